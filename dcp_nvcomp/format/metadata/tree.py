"""From the inert tree of a `.metadata` to torch's own classes: every type, length and range is checked on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import CheckpointError, MetadataError, UnsafePathError
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.metadata.allowed_globals import (
    BYTES,
    INDEX,
    LIMIT,
    METADATA,
    OLD_PROPERTIES,
    PROPERTIES,
    SHARD,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    Global,
    Instance,
    PickledDict,
    PickledList,
    PickledPath,
    TrustedCall,
    shown,
    size_of,
)
from dcp_nvcomp.format.metadata.places import ShardPlaces
from dcp_nvcomp.format.metadata.row_reader import PickledRows, joined
from dcp_nvcomp.format.metadata.shards import StockItem, StoredAt
from dcp_nvcomp.format.metadata.values import ValueReader, check_hashes, pairs_of
from dcp_nvcomp.storage.base import BESIDE, check_relative_path

_new_tuple: Final = tuple.__new__
_HAS_STRIDES: Final = "strides" in TensorProperties.__dataclass_fields__  # torch >= 2.15


class MetadataReader:
    """Turns one tree into torch's Metadata; what the file shares by identity is built once."""

    def __init__(self, path: str, data_nbytes: int) -> None:
        self._path = path
        self._reader = ValueReader(data_nbytes)
        self._files: dict[int, DataFileRef] = {}
        self._names: set[str] = set()
        # by the ids of their nodes, which are kept alive
        self._known_shards: dict[Any, tuple[Sequence[object], list[ChunkStorageMetadata]]] = {}

    def metadata(self, tree: object) -> Metadata:
        """Return the checked metadata. Consumes the tree."""
        tensors, planner, storage, meta, version = self._values(
            tree, METADATA, ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
        )
        return Metadata(
            state_dict_metadata=self._items(tensors),
            planner_data=self._reader.planner_data(planner),
            storage_data=self._storage_data(storage),
            storage_meta=None if meta is None else self._storage_meta(meta),
            version=_optional_text(version, "version"),
        )

    def _values(self, node: object, kind: Global, names: tuple[str, ...]) -> list[Any]:
        """Return the attributes `names` of an instance of `kind`; None for missing ones."""
        if type(node) is not Instance or node.kind is not kind:
            raise MetadataError(f"There is {shown(node)} where a {kind.name} must be.")
        state = node.state
        if type(state) is not PickledDict:
            raise MetadataError(f"A {kind.name} has no attributes.")
        if len(state) > 2 * len(names):
            self._reader.spend(len(state))
        given = state[::2]
        if given == [*names[: len(given)]]:  # in torch's order, the last ones may be missing
            return state[1::2] + [None] * (len(names) - len(given))
        if not all(type(name) is str for name in given):
            raise MetadataError(f"A {kind.name} has attributes that are not named by text.")
        fields = dict(zip(given, state[1::2], strict=True))
        return [fields.get(name) for name in names]

    # ---- state_dict_metadata

    def _items(self, node: object) -> dict[str, Any]:
        pairs = pairs_of(node, "state_dict_metadata")
        items: dict[str, Any] = {}
        for fqn, item in zip(pairs[::2], pairs[1::2], strict=True):
            if type(fqn) is not str:
                raise MetadataError(f"A key of the state dict is {shown(fqn)}, not text.")
            try:
                items[fqn] = self._item(item)
            except CheckpointError as error:
                error.fqn = fqn
                raise
        if len(items) * 2 != len(pairs):
            raise MetadataError("state_dict_metadata has a key twice.")
        return items

    def _item(self, node: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if type(node) is not Instance or node.kind not in (TENSOR, BYTES):
            raise MetadataError(f"There is {shown(node)} where a tensor or bytes item must be.")
        if node.built is None:
            node.built = BytesStorageMetadata() if node.kind is BYTES else self._tensor(node)
            node.state = None  # frees the tree as it goes
        built: TensorStorageMetadata | BytesStorageMetadata = node.built
        return built

    def _tensor(self, node: Instance) -> TensorStorageMetadata:
        properties, size, shards = self._values(node, TENSOR, ("properties", "size", "chunks"))
        size = _size(size, "A tensor's size")
        if type(shards) not in (PickledList, tuple) or not shards:
            raise MetadataError("A tensor has no list of shards.")
        self._reader.spend(len(shards))
        built = self._properties(properties)
        if math.prod(length or 1 for length in size) * built.dtype.itemsize >= LIMIT:
            raise MetadataError(f"A tensor of {tuple(size)} elements is larger than any storage.")
        return TensorStorageMetadata(built, size, self._shards(shards, size))

    def _shards(self, nodes: Sequence[object], size: torch.Size) -> list[ChunkStorageMetadata]:
        """Return the shards of a tensor; those that another of its size has are checked already."""
        key = size, tuple(map(id, nodes))
        if key not in self._known_shards:
            self._known_shards[key] = nodes, [self._shard(node, size) for node in nodes]
        return self._known_shards[key][1].copy()

    def _shard(self, node: object, size: torch.Size) -> ChunkStorageMetadata:
        if type(node) is Instance and type(node.built) is ChunkStorageMetadata:
            built = node.built
        else:
            built = self._new_shard(node)
        offsets, sizes = built.offsets, built.sizes
        if not len(offsets) == len(sizes) == len(size):
            raise MetadataError(f"A shard at {tuple(offsets)} of {tuple(sizes)} is not one of {tuple(size)}.")
        for start, length, stop in zip(offsets, sizes, size, strict=True):
            if start + length > stop:
                raise MetadataError(f"A shard at {tuple(offsets)} of {tuple(sizes)} is not inside {tuple(size)}.")
        return built

    def _new_shard(self, node: object) -> ChunkStorageMetadata:
        offsets, sizes = self._values(node, SHARD, ("offsets", "sizes"))
        assert type(node) is Instance
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
            offsets, sizes = _size(offsets, "A shard's offset"), _size(sizes, "A shard's size")
        node.built = built = ChunkStorageMetadata(offsets, sizes)
        node.state = None
        return built

    def _properties(self, node: object) -> TensorProperties:
        if type(node) is not Instance or node.kind not in (PROPERTIES, OLD_PROPERTIES):
            raise MetadataError(f"There is {shown(node)} where a {PROPERTIES.name} must be.")
        if type(node.built) is TensorProperties:
            return node.built
        state = node.state  # five values, six from 2.15 on; what a later torch appends is ignored
        if type(state) is not tuple or len(state) < 5:
            raise MetadataError("TensorProperties have a state that is not understood.")
        dtype, layout, requires_grad, memory_format, pin_memory = state[:5]
        if type(dtype) is not Global or not isinstance(dtype.value, torch.dtype):
            raise MetadataError(f"A tensor's dtype is {shown(dtype)}.")
        if not isinstance(layout, torch.layout) or not isinstance(memory_format, torch.memory_format):
            raise MetadataError(f"A tensor's layout is {shown(layout)}, its memory format {shown(memory_format)}.")
        if type(requires_grad) is not bool or type(pin_memory) is not bool:
            raise MetadataError("A tensor's requires_grad or pin_memory is not a bool.")
        node.built = built = TensorProperties(dtype.value, layout, requires_grad, memory_format, pin_memory)
        if _HAS_STRIDES and len(state) > 5:
            built.strides = self._strides(state[5])  # type: ignore[attr-defined,unused-ignore]
        return built

    def _strides(self, node: object) -> tuple[int, ...] | None:
        if node is None:
            return None
        if type(node) is not tuple or not all(type(stride) is int and -LIMIT <= stride < LIMIT for stride in node):
            raise MetadataError(f"A tensor's strides are {shown(node)}.")
        self._reader.spend(len(node))
        return node

    # ---- storage_data and storage_meta

    def _storage_data(self, node: object) -> Mapping[MetadataIndex, Any]:
        pairs = pairs_of(node, "storage_data")
        rows = [key for key in pairs[::2] if type(key) is PickledRows]
        if not rows:
            return self._single_places(pairs)
        pairs = PickledDict(
            part for at in range(0, len(pairs), 2) if type(pairs[at]) is not PickledRows for part in pairs[at : at + 2]
        )
        found = joined(rows)
        files = [self._file(file) for file in found.files]
        return ShardPlaces(found.fqns, found.offsets, files, found.columns, self._single_places(pairs))

    def _single_places(self, pairs: PickledDict) -> dict[MetadataIndex, Any]:
        indices = [self._index(key) for key in pairs[::2]]
        check_hashes([hash((index.fqn, index.offset)) for index in indices])
        storage: dict[MetadataIndex, Any] = {}
        for index, value in zip(indices, pairs[1::2], strict=True):
            try:
                storage[index] = self._location(value)
            except CheckpointError as error:
                error.fqn = index.fqn
                raise
        if len(storage) * 2 != len(pairs):
            raise MetadataError("storage_data has a key twice.")
        return storage

    def _index(self, node: object) -> MetadataIndex:
        if type(node) is Instance and type(node.built) is MetadataIndex:
            return node.built
        fqn, index, offset = self._values(node, INDEX, ("fqn", "index", "offset"))
        if type(fqn) is not str:
            raise MetadataError(f"A key of storage_data names {shown(fqn)}, not text.")
        if index is not None and (type(index) is not int or not 0 <= index < LIMIT):
            raise MetadataError(f"A key of storage_data has the index {shown(index)}.")
        if offset is not None and type(offset) is not torch.Size:
            offset = _size(offset, "The offset of a key of storage_data")
        assert type(node) is Instance
        node.built = built = MetadataIndex(fqn, offset, index)
        node.state = None
        return built

    def _location(self, value: object) -> StoredAt | StockItem:
        if type(value) is tuple and len(value) == 2:
            node, record = value
            file = self._files.get(id(node))
            if file is None:
                file = self._files[id(node)] = self._file(node)
            if type(record) is int and 0 <= record < 1 << 32:
                return _new_tuple(StoredAt, (file, record))  # half a million of them: skips the constructor
        if type(value) is Instance and value.kind is STORAGE_INFO:
            names = ("relative_path", "offset", "length", "transform_descriptors")
            return self._stock_item(*self._values(value, STORAGE_INFO, names))
        if type(value) is TrustedCall:
            found = self._reader.trusted(value, 0)
            descriptors = getattr(found, "transform_descriptors", None)
            if all(hasattr(found, name) for name in ("relative_path", "offset", "length")):
                return self._stock_item(found.relative_path, found.offset, found.length, descriptors)
        raise MetadataError(f"storage_data has {shown(value)}, which neither this package nor stock DCP writes.")

    def _file(self, file: object) -> DataFileRef:
        if type(file) is not tuple or len(file) not in (4, 5) or not all(type(value) is int for value in file[1:4]):
            raise MetadataError(f"storage_data has {shown(file)} where a file must be.")
        name, file_nbytes, footer_nbytes, footer_crc, *beside = file
        if not (0 <= footer_nbytes <= file_nbytes < LIMIT and 0 <= footer_crc < 1 << 32):
            raise MetadataError(f"The sizes or the CRC of the file {shown(name)} are out of range.")
        self._relative_path(name)
        for directory in beside:
            if "/" in self._relative_path(directory) or "/" in name:
                raise UnsafePathError(
                    f"The checkpoint names a file {name!r} in a directory {directory!r} beside it, and both must be "
                    "plain names.",
                    path=self._path,
                )
            name = f"{BESIDE}{directory}/{name}"
        return DataFileRef(name, file_nbytes, footer_nbytes, footer_crc)

    def _relative_path(self, name: object) -> str:
        if type(name) is not str:
            raise MetadataError(f"The name of a file is {shown(name)}, not text.")
        if name not in self._names:
            self._names.add(check_relative_path(name, path=self._path))
        return name

    def _stock_item(self, name: object, offset: object, length: object, descriptors: Any) -> StockItem:
        if type(offset) is not int or type(length) is not int or offset < 0 or not 0 <= length < LIMIT - offset:
            raise MetadataError(f"An item begins at {shown(offset)} and has {shown(length)} bytes, which can't be.")
        known = descriptors is None or type(descriptors) in (PickledList, list, tuple)
        if not known or not all(type(text) is str for text in descriptors or ()):
            raise MetadataError(f"An item has the transform descriptors {shown(descriptors)}.")
        self._reader.spend(len(descriptors or ()))
        return StockItem(self._relative_path(name), offset, length, tuple(descriptors or ()))

    def _storage_meta(self, node: object) -> StorageMeta:
        names = ("checkpoint_id", "save_id", "load_id", "modules")
        checkpoint_id, save_id, load_id, modules = self._values(node, STORAGE_META, names)
        if modules is not None and (type(modules) is not PickledList or not all(type(text) is str for text in modules)):
            raise MetadataError("The modules of the storage_meta are not a list of text.")
        return StorageMeta(
            checkpoint_id=self._checkpoint_id(checkpoint_id),
            save_id=_optional_text(save_id, "save_id"),
            load_id=_optional_text(load_id, "load_id"),
            modules=list(modules or ()),
        )

    def _checkpoint_id(self, node: object) -> Any:
        if isinstance(node, PickledPath | TrustedCall):
            return self._reader.value(node, 0)
        return _optional_text(node, "checkpoint_id")


def _size(node: object, what: str) -> torch.Size:
    """Return a size. A planner may have left it a tuple or a list, which stock DCP accepts."""
    if type(node) is torch.Size:
        return node
    if type(node) is tuple or type(node) is PickledList:
        return size_of(tuple(node))
    raise MetadataError(f"{what} is {shown(node)}.")


def _optional_text(node: object, what: str) -> str | None:
    if node is not None and type(node) is not str:
        raise MetadataError(f"The {what} is {shown(node)}, not text.")
    return node
