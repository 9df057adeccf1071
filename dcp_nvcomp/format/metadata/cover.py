"""Whether the shards of a tensor are all of it: DCP's default planner makes sure of that, and others may not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from dcp_nvcomp.errors import CheckpointError, IncompleteCheckpointError, MetadataError

_PARTLY_SAVED = "The shards together leave a part of this tensor unsaved."


class WholeTensors:
    """Refuses tensors of which a part is not there, as a load would leave the destination's elements as they were.

    Shards that overlap are no reason, if they may be the whole tensor: stock DCP reads one after the other.
    """

    def __init__(self) -> None:
        # by the ids of the shards, which stay alive: tensors of one shape share them
        self._known: dict[tuple[torch.Size, tuple[int, ...]], list[ChunkStorageMetadata]] = {}

    def check(self, fqn: str, tensor: TensorStorageMetadata) -> None:
        """Raise `MetadataError` if a part of the tensor is in no shard."""
        size, shards = tensor.size, tensor.chunks
        if len(shards) == 1 and shards[0].sizes == size:
            return
        key = size, tuple(map(id, shards))
        if key in self._known:
            return
        boxes = [*{(shard.offsets, shard.sizes) for shard in shards}]
        saved = sum([math.prod(sizes) for _, sizes in boxes])
        if saved <= math.prod(size):  # so if they overlap, a part is missing too
            try:
                check_cover(size, boxes)
            except CheckpointError as error:
                raise MetadataError(_PARTLY_SAVED, fqn=fqn) from error
        self._known[key] = [*shards]

    def check_all(self, items: Mapping[str, Any]) -> None:
        """Check all tensors of a `state_dict_metadata`."""
        for fqn, item in items.items():
            if isinstance(item, TensorStorageMetadata):
                self.check(fqn, item)


def check_cover(size: torch.Size, shards: Sequence[tuple[torch.Size, torch.Size]]) -> None:
    """Raise unless the shards, whose offsets differ, are disjoint and together the whole tensor."""
    boxes = [(offsets, sizes) for offsets, sizes in shards if 0 not in sizes]
    if 0 in size or _is_grid(size, boxes):
        return
    _check_disjoint(boxes)
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size):
        raise IncompleteCheckpointError(_PARTLY_SAVED)


def _is_grid(size: torch.Size, boxes: Sequence[tuple[torch.Size, torch.Size]]) -> bool:
    """True if the boxes are all cells of a grid over the whole tensor, the usual case and a quick check."""
    cells = 1
    for dim, length in enumerate(size):
        cuts = sorted({(offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in boxes})
        starts = [start for start, _ in cuts]
        if starts != [0, *(stop for _, stop in cuts)][: len(cuts)] or not cuts or cuts[-1][1] != length:
            return False
        cells *= len(cuts)
    return cells == len(boxes)


def _check_disjoint(boxes: Sequence[tuple[torch.Size, torch.Size]]) -> None:
    """Sweep along the dimension with the most cuts, comparing each box with those that it overlaps there."""
    dims = range(len(boxes[0][0])) if boxes else range(0)
    sweep = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in boxes}), default=0)
    active: list[tuple[torch.Size, torch.Size]] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][sweep] if dims else 0):
        active = [other for other in active if other[0][sweep] + other[1][sweep] > offsets[sweep]]
        for other_offsets, other_sizes in active:
            if all(
                offsets[dim] < other_offsets[dim] + other_sizes[dim] and other_offsets[dim] < offsets[dim] + sizes[dim]
                for dim in dims
            ):
                raise MetadataError(
                    f"The shard at {tuple(offsets)} of {tuple(sizes)} overlaps the one at {tuple(other_offsets)} of "
                    f"{tuple(other_sizes)}."
                )
        active.append((offsets, sizes))
