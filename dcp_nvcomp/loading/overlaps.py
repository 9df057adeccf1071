"""Plans reads of tensors that were saved in many shards, as DCP does, but with all of a tensor's shards at once.

DCP looks at each saved shard of each tensor: half a million at 512 ranks. Tensors of one shape share their shards in
`.metadata`, so there are few sets of shards, and numpy compares one with a part that is wanted in some microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

_Ints = npt.NDArray[np.int64]


class SavedShards:
    """The saved shards of tensors, of which many may be the same."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[int, ...], tuple[_Ints, _Ints]] = {}  # by the ids of the shards, which stay alive

    def items(
        self, fqn: str, saved: Sequence[ChunkStorageMetadata], wanted: Sequence[ChunkStorageMetadata]
    ) -> list[ReadItem]:
        """Return what to read for the wanted parts of a tensor.

        Args:
            fqn: the tensor's name.
            saved: its saved shards; not to be changed as long as this object is used.
            wanted: the parts that this rank has, as `DTensor.__create_chunk_list__` makes them.
        """
        starts, stops = self._bounds_of(saved)
        items = []
        for number, part in enumerate(wanted):
            start, stop = np.array(part.offsets, np.int64), np.add(part.offsets, part.sizes, dtype=np.int64)
            overlapping = ((starts < stop) & (start < stops)).all(1)
            for at in np.flatnonzero(overlapping).tolist():
                items.append(_item(fqn, saved[at], at, part, number))
        return items

    def _bounds_of(self, saved: Sequence[ChunkStorageMetadata]) -> tuple[_Ints, _Ints]:
        key = tuple(map(id, saved))
        found = self._bounds.get(key)
        if found is None:
            starts = np.array([shard.offsets for shard in saved], np.int64)
            found = self._bounds[key] = starts, starts + np.array([shard.sizes for shard in saved], np.int64)
        return found


def _item(fqn: str, saved: ChunkStorageMetadata, at: int, part: ChunkStorageMetadata, number: int) -> ReadItem:
    bounds = list(zip(saved.offsets, saved.sizes, part.offsets, part.sizes, strict=True))
    begins = [max(first, second) for first, _, second, _ in bounds]
    ends = [min(first + size, second + length) for first, size, second, length in bounds]
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(fqn, part.offsets, number),
        torch.Size([begin - first for begin, first in zip(begins, part.offsets, strict=True)]),
        MetadataIndex(fqn, saved.offsets, at),
        torch.Size([begin - first for begin, first in zip(begins, saved.offsets, strict=True)]),
        torch.Size([end - begin for end, begin in zip(ends, begins, strict=True)]),
    )
