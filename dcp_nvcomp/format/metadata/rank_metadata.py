"""Merges the metadata of checkpoints saved with `use_collectives=False`, one file per rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import CheckpointError, IncompleteCheckpointError, MetadataError

_Shards = dict[torch.Size, tuple[torch.Size, int]]  # offsets -> (sizes, the rank that has it)


def merge_rank_metadata(parts: Mapping[int, Metadata], *, path: str) -> Metadata:
    """Merge the metadata of every rank into that of the whole checkpoint; the lowest rank wins (see `prefer_rank`)."""
    assert parts
    ranks = sorted(parts)
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks))
    if missing:
        raise IncompleteCheckpointError(
            f"The metadata of rank {missing[0]} is missing: its save never finished.", path=path
        )
    owners: dict[str, list[int]] = {}
    for rank in ranks:
        for fqn in parts[rank].state_dict_metadata:
            owners.setdefault(fqn, []).append(rank)
    items: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for fqn, having in owners.items():
        try:
            items[fqn] = _merge_item(fqn, {rank: parts[rank] for rank in having}, storage)
        except CheckpointError as error:
            error.path, error.fqn = path, fqn
            raise
    first = parts[ranks[0]]
    return Metadata(
        state_dict_metadata=items,
        planner_data=_merge_planner_data([parts[rank].planner_data for rank in ranks]),
        storage_data=storage,
        storage_meta=first.storage_meta,
        version=first.version,
    )


def prefer_rank(merged: Metadata, own: Metadata) -> dict[MetadataIndex, Any]:
    """Return the merged `storage_data`, with one rank's own copy of each item it saved itself."""
    storage = dict(merged.storage_data)
    for fqn, item in own.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            indices = [MetadataIndex(fqn)]
        else:
            whole = merged.state_dict_metadata[fqn]
            assert isinstance(whole, TensorStorageMetadata)
            sizes = {shard.offsets: shard.sizes for shard in whole.chunks}
            indices = [MetadataIndex(fqn, s.offsets) for s in item.chunks if sizes.get(s.offsets) == s.sizes]
        storage.update({index: own.storage_data[index] for index in indices if index in own.storage_data})
    return storage


def _merge_item(fqn: str, parts: dict[int, Metadata], storage: dict[MetadataIndex, Any]) -> Any:
    """Merge one key of the state dict from the ranks that have it, and add its shards to `storage`."""
    items: dict[int, Any] = {rank: part.state_dict_metadata[fqn] for rank, part in parts.items()}
    rank, first = next(iter(items.items()))
    for other_rank, other in items.items():
        if _kind(other) != _kind(first):
            raise MetadataError(
                f"Rank {rank} saved {_description(first)}, and rank {other_rank} saved {_description(other)}."
            )
    if isinstance(first, BytesStorageMetadata):
        index = MetadataIndex(fqn)
        storage[index] = _stored(parts[rank], index, rank)
        return first
    shards = _merge_shards(items)
    for position, (offsets, (_, owner)) in enumerate(shards.items()):
        index = MetadataIndex(fqn, offsets, position)
        storage[index] = _stored(parts[owner], index, owner)
    boxes = [(offsets, sizes) for offsets, (sizes, _) in shards.items()]
    check_cover(first.size, boxes)
    return TensorStorageMetadata(first.properties, first.size, [ChunkStorageMetadata(*box) for box in boxes])


def _kind(item: Any) -> tuple[Any, ...] | None:
    return None if isinstance(item, BytesStorageMetadata) else (item.properties.dtype, item.size)


def _description(item: Any) -> str:
    if isinstance(item, BytesStorageMetadata):
        return "an object"
    return f"a tensor of {item.properties.dtype} and {tuple(item.size)}"


def _merge_planner_data(values: list[Any]) -> Any:
    """The union of the ranks' paths; what isn't a dict can't be merged, and the lowest rank's is taken."""
    present = [value for value in values if value is not None]
    if not present or not all(isinstance(value, dict) for value in present):
        return present[0] if present else None
    merged: dict[Any, Any] = {}
    for value in reversed(present):
        merged.update(value)
    return merged


def _stored(part: Metadata, index: MetadataIndex, rank: int) -> Any:
    try:
        return part.storage_data[index]
    except KeyError:
        raise MetadataError(f"The metadata of rank {rank} does not say where it stored its part.") from None


def _merge_shards(items: dict[int, TensorStorageMetadata]) -> _Shards:
    shards: _Shards = {}
    for rank, item in items.items():
        for shard in item.chunks:
            known = shards.get(shard.offsets)
            if known is None or (0 in known[0] and 0 not in shard.sizes):
                shards[shard.offsets] = (shard.sizes, rank)
            elif known[0] != shard.sizes and 0 not in shard.sizes:
                raise MetadataError(
                    f"At {tuple(shard.offsets)}, rank {known[1]} saved a shard of {tuple(known[0])}, and rank {rank} "
                    f"one of {tuple(shard.sizes)}."
                )
    return shards


def check_cover(size: torch.Size, shards: Sequence[tuple[torch.Size, torch.Size]]) -> None:
    """Raise unless the shards, whose offsets differ, are disjoint and together the whole tensor."""
    boxes = [(offsets, sizes) for offsets, sizes in shards if 0 not in sizes]
    if 0 in size or _is_grid(size, boxes):
        return
    _check_disjoint(boxes)
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size):
        raise IncompleteCheckpointError("The shards together leave a part of this tensor unsaved.")


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
