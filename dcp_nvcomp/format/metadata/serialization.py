"""Reads `.metadata` without trusting it, and writes it so that stock torch can read it.

`share_equal` makes equal parts one object, which the pickle names by a few bytes when it meets them again: a file of
10,000 small tensors is half as long.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import io
import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.allowed_globals import ALLOWED, PickledDict, resolve_trusted_globals
from dcp_nvcomp.format.metadata.pickle_machine import run_pickle
from dcp_nvcomp.format.metadata.shards import plain_storage_data
from dcp_nvcomp.format.metadata.summary import SUMMARY_ATTRIBUTE, Summary, end_of_pickle, with_trailer
from dcp_nvcomp.format.metadata.tree import MetadataReader
from dcp_nvcomp.format.metadata.values import ValueReader
from dcp_nvcomp.storage.base import BESIDE

_LEAST_TREE_NBYTES: Final = 1 << 20


def serialize_metadata(metadata: Metadata, summary: Summary | None = None) -> bytes:
    """Return the bytes of `.metadata`: a pickle that stock DCP reads with torch alone, followed by its CRC."""
    if not all(map(_is_plain, metadata.storage_data.values())):
        metadata = dataclasses.replace(metadata, storage_data=plain_storage_data(metadata.storage_data))
    text = None if summary is None else summary.to_text()
    if text is not None:
        metadata = dataclasses.replace(metadata)
        setattr(metadata, SUMMARY_ATTRIBUTE, text)
    return with_trailer(_pickled(metadata))


def _is_plain(stored: Any) -> bool:
    return type(stored) is tuple and type(stored[0]) is tuple and not stored[0][0].startswith(BESIDE)


def _pickled(metadata: Metadata) -> bytes:
    """Return the pickle of metadata, with enums by class and value, whatever the release of Python writes for them."""
    state = TensorProperties().__getstate__()  # type: ignore[no-untyped-call]
    kinds = {type(value) for value in state if isinstance(value, enum.Enum)}
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(kinds, _by_value)}
    pickler.dump(metadata)
    return file.getvalue()


def _by_value(member: enum.Enum) -> tuple[type[enum.Enum], tuple[Any, ...]]:
    return type(member), (member.value,)


def parse_metadata(
    data: bytes, *, path: str, trusted_globals: Sequence[str] = (), limit_nbytes: int = MAX_METADATA_NBYTES
) -> Metadata:
    """Read `.metadata` without executing anything that it names; attributes of a later torch are ignored."""
    trusted = resolve_trusted_globals(trusted_globals)
    try:
        end = end_of_pickle(data)
        # what is made of the tree takes about as much memory as the tree
        most_nbytes = max((3 * limit_nbytes - len(data)) // 2, _LEAST_TREE_NBYTES)
        with collector_paused():
            return MetadataReader(path, end).metadata(
                run_pickle(data, ALLOWED, trusted, end=end, most_nbytes=most_nbytes)
            )
    except CheckpointError as error:
        error.path = error.path or path
        raise


def share_equal(metadata: Metadata, leave: set[str | MetadataIndex]) -> Metadata:
    """Return metadata of the same values."""
    shared = _Shared()
    items = {
        shared.text(fqn): shared.tensor(item) if type(item) is TensorStorageMetadata and fqn not in leave else item
        for fqn, item in metadata.state_dict_metadata.items()
    }
    places = {index if index in leave else shared.index(index): place for index, place in metadata.storage_data.items()}
    return dataclasses.replace(metadata, state_dict_metadata=items, storage_data=places)


def fits_earlier_readers(planner_data: Any, shard_count: int, nbytes: int) -> bool:
    """Return True if a reader, whose budget for list indices is the file's size, may read metadata of `nbytes`."""
    if planner_data is None:
        return True
    if type(planner_data) is not dict:
        return False
    reader = ValueReader(nbytes)
    try:
        reader.spend(shard_count)
        reader.planner_data(PickledDict(part for pair in planner_data.items() for part in pair))
    except CheckpointError:
        return False
    return True


class _Shared:
    """The first of each kind of equal values."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._sizes: dict[torch.Size, torch.Size] = {}
        self._values: dict[Any, Any] = {}

    def text(self, text: str) -> str:
        return self._texts.setdefault(text, text)

    def tensor(self, item: TensorStorageMetadata) -> TensorStorageMetadata:
        shards = [self._shard(shard) for shard in item.chunks]
        return TensorStorageMetadata(self._properties(item.properties), self._size(item.size), shards)

    def _properties(self, properties: TensorProperties) -> TensorProperties:
        values = tuple(vars(properties).values())
        try:
            kept: TensorProperties = self._values.setdefault((values, *map(type, values)), properties)  # as 1 is True
        except TypeError:  # something in it can't be hashed
            return properties
        return kept

    def _shard(self, shard: ChunkStorageMetadata) -> ChunkStorageMetadata:
        key = shard.offsets, shard.sizes
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = ChunkStorageMetadata(self._size(shard.offsets), self._size(shard.sizes))
        return found

    def _size(self, size: torch.Size) -> torch.Size:
        return self._sizes.setdefault(size, size)

    def index(self, index: MetadataIndex) -> MetadataIndex:
        shared = MetadataIndex(self.text(index.fqn), None, index.index)
        if index.offset is not None:  # which the constructor would copy
            object.__setattr__(shared, "offset", self._size(index.offset))
        return shared
