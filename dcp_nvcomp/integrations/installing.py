"""`install`: what a program saves through stock DCP goes through this package, without a change of the program."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from importlib import metadata
from typing import Any

from dcp_nvcomp.calls.suggestions import advice_for, unknown_option
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.integrations.stock_classes import Kind, add_maker, remove_maker
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.options import STOCK_READER, STOCK_WRITER, option_names
from dcp_nvcomp.saving.commit import Publisher
from dcp_nvcomp.saving.writer import NvcompWriter

# What stock DCP's classes call the arguments that tune how they write and read. They mean nothing here.
_TUNING = frozenset(
    {
        "single_file_per_rank",
        "sync_files",
        "thread_count",
        "per_thread_copy_ahead",
        "cache_staged_state_dict",
        "serialization_format",
        "_extensions",
        "_extension_registry",
    }
)


def ours(kind: Kind, path: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return our writer or reader for a call of stock DCP's; None if that asks for what only stock DCP can do."""
    if getattr(arguments.get("serialization_format"), "name", "TORCH_SAVE") != "TORCH_SAVE":
        return None
    if arguments.get("_extension_registry") is not None or arguments.get("_extensions"):
        return None  # an extension may do more than compress: encrypt, for one
    kept = {name: value for name, value in arguments.items() if name not in _TUNING}
    return (NvcompWriter if kind == "writer" else NvcompReader)(path, **{**kept, **options})


class Installation:
    """What `install` returns. As a context manager it ends with the block.

    Args:
        writer: options of `NvcompWriter`.
        reader: options of `NvcompReader`.
    """

    def __init__(self, writer: Mapping[str, Any], reader: Mapping[str, Any]) -> None:
        self._options: dict[Kind, Mapping[str, Any]] = {"writer": dict(writer), "reader": dict(reader)}
        self._is_active = True
        add_maker(self._make)

    def _make(self, kind: Kind, path: Any, arguments: Mapping[str, Any]) -> Any:
        return ours(kind, path, arguments, self._options[kind])

    def uninstall(self) -> None:
        """Let stock DCP's classes be stock DCP's again. Saves that have begun go on as they are."""
        if self._is_active:
            self._is_active = False
            remove_maker(self._make)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def install(writer: Mapping[str, Any] | None = None, reader: Mapping[str, Any] | None = None) -> Installation:
    """Save and load through this package what names no storage of its own, or stock DCP's by its class.

    From the call on, in this process: call it on every rank. The newest of several installations counts. Stock DCP's
    arguments for tuning (`thread_count`, `single_file_per_rank`, ...) are not passed on; `overwrite` and options of the
    storage are. Subclasses of its writers and readers are left alone, and so are calls that ask for safetensors,
    extensions or an extension registry. Asynchronous saves that begin meanwhile are ours to their end.

    Args:
        writer: options of `NvcompWriter`, but for the path.
        reader: options of `NvcompReader`, but for the path.

    Returns:
        The installation. Use it as a context manager, or call `uninstall()`, to end it.

    Raises:
        ConfigurationError: an option has an invalid value, or looks misspelled, or this torch is not one that is known.
            A name that resembles none of ours is taken for an option of the storage, which shows with its first URL.

    Examples:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from dcp_nvcomp import open_checkpoint
        >>> from dcp_nvcomp.integrations import install
        >>> path = tempfile.mkdtemp()
        >>> with install(writer={"codec": "auto"}):
        ...     _ = dcp.save({"w": torch.arange(3)}, checkpoint_id=path, no_dist=True)
        >>> open_checkpoint(path)["w"][:]
        tensor([0, 1, 2])
    """
    check_options("writer", writer)
    check_options("reader", reader)
    return Installation(writer or {}, reader or {})


@contextlib.contextmanager
def install_here(
    writer: Mapping[str, Any] | None, reader: Mapping[str, Any] | None, *, publisher: Publisher | None = None
) -> Iterator[None]:
    """Let what this thread saves and loads in the block, and no other, go through this package."""
    check_options("writer", writer)
    check_options("reader", reader)
    options: dict[Kind, Mapping[str, Any]] = {"writer": writer or {}, "reader": reader or {}}
    block = object()

    def make(kind: Kind, path: Any, arguments: Mapping[str, Any]) -> Any:
        if _block.get() is not block:
            return None
        made = ours(kind, path, arguments, options[kind])
        if publisher is not None and isinstance(made, NvcompWriter):
            made.published_by(publisher)
        return made

    add_maker(make)
    token = _block.set(block)
    try:
        yield
    finally:
        _block.reset(token)
        remove_maker(make)


_block: ContextVar[object] = ContextVar("block", default=None)  # of `install_here` that this thread is in


def check_methods(base: Any, package: str, *names: str) -> None:
    """Fail at once where a framework lacks a method that a class of ours takes the place of."""
    for name in names:
        if not callable(getattr(base, name, None)):
            raise ConfigurationError(
                f"{package} {metadata.version(package)} has no method {name} where it is looked for: what was saved "
                f"there might not be loaded again. Use another version of {package} or of dcp-nvcomp, or install()."
            )


def check_options(kind: Kind, options: Mapping[str, Any] | None) -> None:
    """Fail at once on wrong options; those of a storage show only with its URL."""
    if options is None:
        return
    if not isinstance(options, Mapping) or "path" in options:
        raise ConfigurationError(f"Give options of the {kind} by name, and without the path, not {options!r}.")
    own, stock = (NvcompWriter, STOCK_WRITER) if kind == "writer" else (NvcompReader, STOCK_READER)
    known = {*option_names(own), *stock}
    for option in sorted(options.keys() - known):
        close = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
        if close or advice_for(option, known):
            raise unknown_option(option, close, call=option_names(own))
    own(".", **{name: value for name, value in options.items() if name in known})
