"""The globals that `.metadata` may name, and the inert tree that pickle_machine.py makes of a pickle.

None of the globals executes anything: a class only marks an `Instance`, and the few callables are functions of this
module that check their arguments. The user may allow others with `trusted_globals=`, which become a `TrustedCall`.
"""

from __future__ import annotations

import pathlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_nvcomp.errors import ConfigurationError, MetadataError, UnsafeMetadataError

LIMIT: Final = 1 << 63  # sizes and offsets are int64 in torch
MAX_DIMS: Final = 64  # torch's own kernels stop there
_MODULE: Final = "torch.distributed.checkpoint.metadata"
_PLANS: Final = "torch.distributed.checkpoint.planner"  # Megatron-core keeps the plans of a save in its metadata
_OLD_MODULE: Final = "torch.distributed._shard.sharded_tensor.metadata"  # TensorProperties of older releases

# Ends the error for a global; only readers have the option.
TRUST_ADVICE: Final = " If you know what it is and who wrote this checkpoint, allow it with trusted_globals=."


class PickledList(list[Any]):
    """A pickled list."""

    __slots__ = ()


class PickledDict(list[Any]):
    """A pickled dict, as key, value, key, value, ..."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Global:
    """What one exact "module.name" stands for."""

    name: str
    is_class: bool = False  # NEWOBJ without arguments may make an `Instance` of it, which BUILD may fill once
    reduce: Callable[[tuple[Any, ...]], Any] | None = None
    value: Any = None  # what the name itself means: a dtype, or the object that the user trusts
    is_trusted: bool = False  # named by the user; REDUCE and NEWOBJ make a `TrustedCall`


class Instance:
    """A fresh object of a listed class; `state` is what BUILD gave it, None before."""

    __slots__ = ("built", "kind", "state")

    def __init__(self, kind: Global) -> None:
        self.kind = kind
        self.state: Any = None
        self.built: Any = None  # what tree.py made of it


class TrustedCall(Instance):
    """A call of a global that the user trusts; not made yet."""

    __slots__ = ("args", "dict_items", "is_new", "list_items")

    def __init__(self, kind: Global, args: tuple[Any, ...], *, is_new: bool) -> None:
        super().__init__(kind)
        self.args = args
        self.is_new = is_new
        self.list_items: list[Any] = []
        self.dict_items: list[Any] = []


def shown(value: object) -> str:
    """Describe a part of the tree briefly, for messages: it may be huge, or contain itself."""
    if isinstance(value, Instance | Global):
        return (value.kind if isinstance(value, Instance) else value).name
    if isinstance(value, str | int | float | bytes) or value is None:
        text = repr(value) if not isinstance(value, str | bytes) else repr(value[:80])
        return text if len(text) <= 100 else text[:100] + "..."
    return f"a {type(value).__name__.removeprefix('Pickled').lower()}"


def size_of(dims: object) -> torch.Size:
    """Return a torch.Size of a tuple of lengths."""
    if type(dims) is not tuple or len(dims) > MAX_DIMS:
        raise MetadataError("A torch.Size is not made of one tuple.")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < LIMIT:
            raise MetadataError(f"A torch.Size has the dimension {shown(dim)}.")
    return torch.Size(dims)


def _size(args: tuple[Any, ...]) -> torch.Size:
    return size_of(args[0] if len(args) == 1 else None)


def _lookup(what: str, table: dict[Any, Any]) -> Callable[[tuple[Any, ...]], Any]:
    def reduce(args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or type(args[0]) not in (str, int) or args[0] not in table:
            raise MetadataError(f"Unknown {what} {shown(args)}.")
        return table[args[0]]

    return reduce


def _member_of(enums: set[str], members: dict[str, Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Stand for `getattr`, by which the first releases of Python 3.11 (Debian 12's too) pickle members of an enum."""

    def reduce(args: tuple[Any, ...]) -> Any:
        if len(args) != 2 or type(args[0]) is not Global or args[0].name not in enums or type(args[1]) is not str:
            raise UnsafeMetadataError("The pickle calls 'builtins.getattr', which may only name a memory format here.")
        if args[1] not in members:
            raise MetadataError(f"Unknown memory format {shown(args[1])}.")
        return members[args[1]]

    return reduce


@dataclass(frozen=True)
class PickledPath:
    """A path, not built yet: its text may be long, and shared by many of them."""

    kind: type[pathlib.PurePath]
    parts: tuple[Any, ...]


def _paths() -> dict[str, type[pathlib.PurePath]]:
    here = type(pathlib.Path())
    found: dict[str, type[pathlib.PurePath]] = {}
    for pure in (pathlib.PurePosixPath, pathlib.PureWindowsPath):
        found[pure.__name__] = pure
        found[pure.__name__.removeprefix("Pure")] = here if issubclass(here, pure) else pure
    return found


def _allowed() -> dict[tuple[str, str], Global]:
    names = ["Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"]
    names += ["TensorProperties", "ChunkStorageMetadata"]
    classes = [(_MODULE, name) for name in names] + [("torch.distributed.checkpoint.filesystem", "_StorageInfo")]
    classes += [(_OLD_MODULE, "TensorProperties"), ("torch.distributed.checkpoint.filesystem", "_StoragePrefix")]
    classes += [(_PLANS, name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")]
    found = {pair: Global(".".join(pair), is_class=True) for pair in classes}

    memory_formats = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}
    layouts = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
    calls: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
        ("torch", "Size"): _size,
        ("torch.serialization", "_get_layout"): _lookup("layout", layouts),
        (_MODULE, "_MEM_FORMAT_ENCODING"): _lookup("memory format", memory_formats),
        (_OLD_MODULE, "MEM_FORMAT_ENCODING"): _lookup("memory format", memory_formats),
        (_PLANS, "WriteItemType"): _lookup("kind of item", {kind.value: kind for kind in WriteItemType}),
    }
    encodings = [(_MODULE, "_MEM_FORMAT_ENCODING"), (_OLD_MODULE, "MEM_FORMAT_ENCODING")]
    members = {f"TORCH_{str(value).removeprefix('torch.').upper()}": value for value in memory_formats.values()}
    calls["builtins", "getattr"] = _member_of({".".join(pair) for pair in encodings}, members)
    for name, kind in _paths().items():
        for module in ("pathlib", "pathlib._local"):  # Python 3.13 pickles the second
            calls[module, name] = partial(PickledPath, kind)
    found.update({pair: Global(".".join(pair), reduce=reduce) for pair, reduce in calls.items()})

    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    found.update({("torch", name): Global(f"torch.{name}", value=value) for name, value in dtypes.items()})
    return found


ALLOWED: Final = _allowed()


def _class(name: str, module: str = _MODULE) -> Global:
    return ALLOWED[module, name]


METADATA: Final = _class("Metadata")
INDEX: Final = _class("MetadataIndex")
STORAGE_META: Final = _class("StorageMeta")
TENSOR: Final = _class("TensorStorageMetadata")
BYTES: Final = _class("BytesStorageMetadata")
PROPERTIES: Final = _class("TensorProperties")
OLD_PROPERTIES: Final = _class("TensorProperties", _OLD_MODULE)
SHARD: Final = _class("ChunkStorageMetadata")
STORAGE_INFO: Final = _class("_StorageInfo", "torch.distributed.checkpoint.filesystem")


def resolve_trusted_globals(names: Sequence[str]) -> dict[str, Any]:
    """Import the globals of `trusted_globals=`, each named "module.name"."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"trusted_globals= takes a sequence of 'module.name' strings, not {names!r}.")
    found = {}
    for name in names:
        try:
            if "." not in name or ":" in name:
                raise ValueError("not of the form 'module.name'")
            found[name] = pkgutil.resolve_name(name)
        except (ValueError, ImportError, AttributeError) as error:
            raise ConfigurationError(f"trusted_globals= names {name!r}, which can't be imported: {error}.") from error
    return found
