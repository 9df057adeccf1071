"""A save planner that reads what it is asked for from a source, piece by piece.

Tensors larger than a piece become several shards of whole rows, as if as many ranks had saved them, so that no more
than a few pieces are in memory at a time. Loads see the whole tensor.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_nvcomp.conversion.entries import ObjectEntry, TensorEntry, paths_in_order, pieces
from dcp_nvcomp.format.blocks import Box
from dcp_nvcomp.format.metadata.paths import paths_to_store


class ConvertingPlanner(SavePlanner):
    """Plans and provides entries of a source."""

    def __init__(
        self, entries: Sequence[TensorEntry | ObjectEntry], moved: Callable[[int], None], *, has_keys: bool
    ) -> None:
        self._has_keys = has_keys
        self._entries = {entry.key: entry for entry in entries}
        self._moved = moved

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for entry in self._entries.values():
            items += _tensor_items(entry) if isinstance(entry, TensorEntry) else [_object_item(entry)]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        paths = paths_in_order(self._entries.values())
        stored = paths_to_store(paths)
        if not self._has_keys:
            stored = {key: stored[key] for key in paths}
        return plans, dataclasses.replace(metadata, planner_data=stored)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        entry = self._entries[write_item.index.fqn]
        if isinstance(entry, ObjectEntry):
            return io.BytesIO(entry.reader.stored())
        assert write_item.tensor_data is not None
        shard = write_item.tensor_data.chunk
        tensor = entry.read(Box(tuple(shard.offsets), tuple(shard.sizes)))
        self._moved(tensor.nbytes)
        return tensor


def _tensor_items(entry: TensorEntry) -> list[WriteItem]:
    boxes = list(pieces(entry.shape, entry.dtype.itemsize))
    kind = WriteItemType.TENSOR if len(boxes) == 1 else WriteItemType.SHARD
    size, properties = torch.Size(entry.shape), TensorProperties(dtype=entry.dtype)
    return [
        WriteItem(
            MetadataIndex(entry.key, torch.Size(box.offsets), number),
            kind,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), properties, size
            ),
        )
        for number, box in enumerate(boxes)
    ]


def _object_item(entry: ObjectEntry) -> WriteItem:
    return WriteItem(MetadataIndex(entry.key), WriteItemType.BYTE_IO)
