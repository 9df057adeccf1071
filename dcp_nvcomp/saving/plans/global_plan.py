"""The global plan as the coordinator keeps it, and what travels of it.

A rank's write results name nothing that the coordinator knows: they are positions in the rank's plan, and where these
items were stored (`PlacedItems`).
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp.format.collector import collector_paused


@dataclass(frozen=True)
class PlacedItems:
    """Where a rank stored the items of its plan."""

    files: tuple[tuple[Any, ...], ...]
    counts: tuple[int, ...]  # of items in each file
    positions: array[int]  # in the plan, file after file
    records: array[int]


class GlobalPlan:
    """What was planned for all ranks."""

    def __init__(
        self, plans: Sequence[SavePlan], metadata: Metadata, compared_keys: Sequence[tuple[str, ...]] = ()
    ) -> None:
        shared: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.compared_keys = [shared.setdefault(keys, keys) for keys in compared_keys]
        with collector_paused():
            self._indices = [tuple(item.index for item in plan.items) for plan in plans]
            self._items = _shared(metadata.state_dict_metadata)
        self._planner_data = metadata.planner_data
        self.is_settled = False

    @property
    def shard_count(self) -> int:
        return sum(map(len, self._indices))

    def metadata(self) -> PlannedMetadata:
        """Return the metadata of another save, of which everything that may be changed is its own."""
        with collector_paused():
            items = _own(self._items)
        paths = dict(self._planner_data) if type(self._planner_data) is dict else self._planner_data
        return PlannedMetadata(items, planner_data=paths).planned(self)

    def settle(self, settled: Metadata) -> None:
        """Use the very parts of metadata that was published, for later saves."""
        with collector_paused():
            own = {index: index for index in settled.storage_data}
            self._indices = [tuple([own[index] for index in indices]) for indices in self._indices]
            self._items = _own(settled.state_dict_metadata)
        self.is_settled = True

    def storage_data(self, ranks: Sequence[PlacedItems]) -> dict[MetadataIndex, Any]:
        found: dict[MetadataIndex, Any] = {}
        with collector_paused():
            for indices, placed in zip(self._indices, ranks, strict=True):
                begin = 0
                for file, count in zip(placed.files, placed.counts, strict=True):
                    end = begin + count
                    for position, record in zip(placed.positions[begin:end], placed.records[begin:end], strict=True):
                        found[indices[position]] = (file, record)
                    begin = end
        return found


class PlannedMetadata(Metadata):
    """Metadata of a planned save. Pickled, it is a Metadata without the tensors."""

    plan: GlobalPlan

    def planned(self, plan: GlobalPlan) -> PlannedMetadata:
        self.plan = plan
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_tensors, (self.storage_meta,)

    def plain(self) -> Metadata:
        return Metadata(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Metadata)})


def _without_tensors(storage_meta: StorageMeta | None) -> Metadata:
    return Metadata({}, storage_meta=storage_meta)


def _shared(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items, in which equal properties are one object."""
    kinds: dict[Any, TensorProperties] = {}
    shared = {}
    for fqn, item in items.items():
        if type(item) is TensorStorageMetadata:
            values = tuple(vars(item.properties).values())
            properties = kinds.setdefault((*values, *map(type, values)), item.properties)
            item = TensorStorageMetadata(properties, item.size, item.chunks)
        shared[fqn] = item
    return shared


def _own(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return items whose changes don't show in the others."""
    properties: dict[int, TensorProperties] = {}
    return {
        fqn: _copied(item, properties) if type(item) is TensorStorageMetadata else dataclasses.replace(item)
        for fqn, item in items.items()
    }


def _copied(item: TensorStorageMetadata, properties: dict[int, TensorProperties]) -> TensorStorageMetadata:
    key = id(item.properties)
    if key not in properties:
        properties[key] = dataclasses.replace(item.properties)
    return TensorStorageMetadata(properties[key], item.size, list(item.chunks))
