"""The one place that touches private names of DCP: it decides what a call of stock DCP's classes returns.

`FileSystemWriter(path)` and its like ask `_makers` in turn, the newest first; the first answer that is not None is what
the call returns. `__new__` is replaced once and for good: a class whose `__new__` was deleted again can't be called
with arguments.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import torch

from dcp_nvcomp.errors import ConfigurationError

Kind: TypeAlias = Literal["writer", "reader"]
# called with the path and the other arguments by name; returns a writer or reader, or None to leave the call as it is
Maker: TypeAlias = Callable[[Kind, Any, Mapping[str, Any]], Any]

_DCP = "torch.distributed.checkpoint"
_FSSPEC = "fsspec_filesystem" if find_spec(f"{_DCP}.fsspec_filesystem") else "_fsspec_filesystem"  # before torch 2.15
_WRITERS = (("filesystem", "FileSystemWriter"), (_FSSPEC, "FsspecWriter"))
_READERS = (("filesystem", "FileSystemReader"), (_FSSPEC, "FsspecReader"))
_EXECUTORS = (
    ("_async_thread_executor", "_ThreadBasedAsyncCheckpointExecutor"),
    ("_async_process_executor", "_ProcessBasedAsyncCheckpointExecutor"),
)

_lock = threading.Lock()
_makers: list[Maker] = []


def add_maker(maker: Maker, *, is_default: bool = False) -> None:
    """Ask `maker` from now on, before all others, or after them if `is_default`."""
    with _lock:
        _hook()
        _makers.insert(len(_makers) if is_default else 0, maker)


def remove_maker(maker: Maker) -> None:
    """Ask `maker` no more."""
    with _lock:
        _makers.remove(maker)


def _made(kind: Kind, path: Any, arguments: Mapping[str, Any]) -> Any:
    for maker in list(_makers):
        made = maker(kind, path, arguments)
        if made is not None:
            return made
    return None


@functools.cache
def _hook() -> None:
    """Replace what has to be replaced; all or nothing, so that a torch without some of it is left as it is."""
    kinds: dict[type, Kind] = {_found(*name): "writer" for name in _WRITERS}
    kinds |= {_found(*name): "reader" for name in _READERS}
    executors = [_found(*name) for name in _EXECUTORS]
    for executor in executors:
        if not {"checkpoint_id", "storage_writer"} <= inspect.signature(executor.execute_save).parameters.keys():
            raise _missing(f"{executor.__name__}.execute_save(checkpoint_id=, storage_writer=)")
    for stock in kinds:
        _hook_class(stock, kinds)
    for executor in executors:
        _hook_executor(executor)


def _found(module: str, name: str) -> Any:
    try:
        return getattr(import_module(f"{_DCP}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise _missing(f"{module}.{name}") from error


def _missing(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"torch {torch.__version__} has no {_DCP}.{name}, which install() and dcpz:// URLs build on. Use another "
        "version of torch or of dcp-nvcomp, or pass storage_writer=NvcompWriter(path) and "
        "storage_reader=NvcompReader(path) to the calls of torch.distributed.checkpoint."
    )


def _hook_class(stock: Any, kinds: Mapping[type, Kind]) -> None:
    before = stock.__new__
    signature = inspect.signature(stock.__init__)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # a subclass of one of the classes that is itself one of them comes by here with its own arguments
        if cls is stock and _makers:
            try:
                bound = signature.bind(None, *args, **kwargs).arguments
            except TypeError:  # no path, as copies and pickles call it; or a mistake, which the class itself refuses
                bound = {}
            if bound.get("path") is not None:
                arguments = {k: v for k, v in bound.items() if k not in ("self", "path", "kwargs")}
                made = _made(kinds[cls], bound["path"], {**arguments, **bound.get("kwargs", {})})
                if made is not None:
                    return made
        return object.__new__(cls) if before is object.__new__ else before(cls, *args, **kwargs)

    new.__signature__ = signature  # type: ignore[attr-defined]  # what inspects the class sees its arguments
    stock.__new__ = new


def _hook_executor(executor: Any) -> None:
    """Let the writer be made at the call: in the thread `install` may be over, and in the process it never was."""
    before = executor.execute_save

    @functools.wraps(before)
    def execute_save(
        self: Any, state: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **options: Any
    ) -> Any:
        if storage_writer is None and checkpoint_id is not None:
            storage_writer = _made("writer", checkpoint_id, {})
        return before(self, state, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **options)

    executor.execute_save = execute_save
