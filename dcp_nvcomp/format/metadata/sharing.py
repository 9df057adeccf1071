"""Makes equal parts of a `.metadata` one object, as the pickle names what it has seen before by a few bytes.

Most tensors of a model are like others: in size, dtype and shards. A file of 10,000 small ones is half as long so, and
is read faster. Each tensor keeps an entry and a list of its own, which readers may change; what they share are sizes,
shards and properties.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.metadata.inert import PickledDict
from dcp_nvcomp.format.metadata.values import ValueReader


def share_equal(metadata: Metadata, leave: set[str | MetadataIndex]) -> Metadata:
    """Return metadata of the same values."""
    shared = _Shared()
    items = {
        shared.text(fqn): shared.tensor(item) if type(item) is TensorStorageMetadata and fqn not in leave else item
        for fqn, item in metadata.state_dict_metadata.items()
    }
    places = {index if index in leave else shared.index(index): place for index, place in metadata.storage_data.items()}
    return dataclasses.replace(metadata, state_dict_metadata=items, storage_data=places)


def fits_earlier_readers(metadata: Metadata, nbytes: int) -> bool:
    """Return True if metadata that takes `nbytes` now is not too much for what a reader may spend on so short a file.

    A reader pays for list indices of `planner_data`, which are not shared, from a budget that is the size of the file.
    """
    paths = metadata.planner_data
    if paths is None:
        return True
    if type(paths) is not dict:
        return False
    reader = ValueReader(nbytes)
    try:
        reader.spend(sum(len(getattr(item, "chunks", ())) for item in metadata.state_dict_metadata.values()))
        reader.planner_data(PickledDict(part for pair in paths.items() for part in pair))
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
