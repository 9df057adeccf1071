"""From keys and boxes to DCP's read items: which shards a box overlaps, and where each part goes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.format.blocks import Box


def items_of_box(fqn: str, described: TensorStorageMetadata, box: Box, *, path: str) -> list[ReadItem]:
    """Return the items that together are a box of a tensor."""
    if not box.elements:
        return []
    items = []
    for number, shard in enumerate(described.chunks):
        part = Box(tuple(shard.offsets), tuple(shard.sizes)).intersect(box)
        if part is not None:
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(fqn),
                    torch.Size(part.relative_to(box.offsets).offsets),
                    MetadataIndex(fqn, shard.offsets, number),
                    torch.Size(part.relative_to(shard.offsets).offsets),
                    torch.Size(part.sizes),
                )
            )
    found = sum(math.prod(item.lengths) for item in items)
    if found != box.elements:
        raise MetadataError(
            f"The shards that `.metadata` lists hold {found} of {box.elements} elements of {box}.", path=path, fqn=fqn
        )
    return items


def items_of_object(fqn: str) -> list[ReadItem]:
    """Return the item that is a Python object."""
    none = torch.Size([0])
    return [ReadItem(LoadItemType.BYTE_IO, MetadataIndex(fqn), none, MetadataIndex(fqn), none, none)]


class Destinations:
    """Where items go: a tensor for each key."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], take_object: Callable[[str, io.BytesIO], None] | None = None
    ) -> None:
        self._tensors = tensors
        self._take_object = take_object

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = Box(tuple(read_item.dest_offsets), tuple(read_item.lengths))
        tensor: torch.Tensor = self._tensors[read_item.dest_index.fqn][box.index]
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert self._take_object is not None
        self._take_object(read_item.dest_index.fqn, value)
