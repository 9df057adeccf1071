"""What `.metadata` says of shards: where each is stored, which of them an index means, and if a footer's record agrees.

    on disk     ((name, nbytes, footer_nbytes, footer_crc), record), plain tuples, so that torch alone can unpickle them

All items of a data file share one tuple by identity, so that pickle writes it once. A file of a checkpoint beside this
one has the name of that one's directory as a fifth field; here it is part of the name, `../directory/name`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, KIND_TORCH_SAVE, Record
from dcp_nvcomp.storage.base import BESIDE

PlainFile = tuple[str, int, int, int] | tuple[str, int, int, int, str]
PlainStoredAt = tuple[PlainFile, int]


class StoredAt(NamedTuple):
    """The place of an item that this package wrote."""

    file: DataFileRef
    record: int  # the index of its record in that file's footer


@dataclass(frozen=True, slots=True)
class StockItem:
    """The place of an item that stock DCP wrote."""

    relative_path: str
    offset: int  # the item's first byte in it
    length: int  # its stored size in bytes
    transform_descriptors: tuple[str, ...]  # the transforms it went through, in the order in which reading undoes them


def plain_storage_data(storage_data: Mapping[MetadataIndex, Any]) -> dict[MetadataIndex, PlainStoredAt]:
    """Return `storage_data` as it is pickled: each `StoredAt` as plain tuples, one for each file."""
    files: dict[int, PlainFile] = {}  # by the id of what is shared
    plain: dict[MetadataIndex, PlainStoredAt] = {}
    for index, value in storage_data.items():
        assert isinstance(value, tuple), "only what this package wrote is written"
        file, record = value
        plain[index] = (files.setdefault(id(file), plain_file(file)), record)
    return plain


def plain_file(file: tuple[Any, ...]) -> PlainFile:
    """Return a `DataFileRef` as it is pickled."""
    name, nbytes, footer_nbytes, footer_crc = file
    if not name.startswith(BESIDE):
        return name, nbytes, footer_nbytes, footer_crc
    directory, _, own_name = name.removeprefix(BESIDE).partition("/")
    return own_name, nbytes, footer_nbytes, footer_crc, directory


@dataclass(frozen=True)
class Shard:
    """A shard of a tensor: its offsets and sizes, and the whole tensor's shape and dtype."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class ShardIndex:
    """Finds the shard that an index means."""

    def __init__(self, state_dict_metadata: Mapping[str, Any]) -> None:
        self._described = state_dict_metadata
        self._numbers: dict[str, dict[tuple[int, ...], int]] = {}  # of a tensor's shards by offsets, where needed

    def is_tensor(self, fqn: str) -> bool:
        """True if the key is a tensor's; False for a Python object, or if there is no such key."""
        return isinstance(self._described.get(fqn), TensorStorageMetadata)

    def find(self, index: MetadataIndex) -> Shard | None:
        """Return the shard; None if the key is not a tensor's, or the tensor has no shard at these offsets."""
        tensor = self._described.get(index.fqn)
        if not isinstance(tensor, TensorStorageMetadata):
            return None
        offsets = tuple(index.offset) if index.offset is not None else (0,) * len(tensor.size)
        number = index.index  # only a hint
        if number is None or not 0 <= number < len(tensor.chunks) or tensor.chunks[number].offsets != offsets:
            if index.fqn not in self._numbers:
                self._numbers[index.fqn] = {tuple(one.offsets): at for at, one in enumerate(tensor.chunks)}
            number = self._numbers[index.fqn].get(offsets)
        if number is None:
            return None
        return Shard(offsets, tuple(tensor.chunks[number].sizes), tuple(tensor.size), tensor.properties.dtype)


def matches(record: Record, fqn: str, shard: Shard | None) -> bool:
    """True if a record is this shard; its dtype may differ, because planners may convert what they save."""
    if record.fqn != fqn:
        return False
    if shard is None:
        return record.kind == KIND_BYTES
    if record.kind not in (KIND_TENSOR, KIND_TORCH_SAVE):
        return False
    same_place = (record.offsets, record.global_shape) == (shard.offsets, shard.global_shape)
    return same_place and (record.kind == KIND_TORCH_SAVE or record.shape == shard.sizes)


def described(record: Record) -> str:
    """Return what a record is, for a message that says that it is not what `.metadata` says."""
    return (
        f"is a {record.kind} of key {record.fqn!r} at {record.offsets}, shape {record.shape} of {record.global_shape}"
    )
