"""The plan of all ranks, as their coordinator keeps it for later saves, and the metadata of a save by it.

A rank's write results name nothing that the coordinator knows: they are positions in the rank's plan, and where these
items were stored (`PlacedItems`). `PlanOfItems` is of the plans that DCP's planner made, an object for each item;
`ArrayPlan` (array_plan.py) of those that the ranks computed.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
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
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.metadata.publishable import publication, settled_to_publish
from dcp_nvcomp.format.metadata.summary import Summary
from dcp_nvcomp.saving.plans.meshes import ComparedShards, differing_shards

# The keys that a rank compares with the other ranks', in lists that many ranks have in common.
ComparedKeys = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PlacedItems:
    files: tuple[tuple[Any, ...], ...]
    counts: tuple[int, ...]  # of items in each file
    positions: array[int]  # in the plan, file after file
    records: array[int]


class GlobalPlan(ABC):
    compared_keys: Sequence[ComparedKeys]  # of each rank
    place_warning: str  # what Comparison found of the values' places

    @property
    @abstractmethod
    def item_count(self) -> int:
        """How many items of a rank's plan take as much memory."""

    @abstractmethod
    def differing_shards(self, values: Sequence[array[int]]) -> dict[str, list[int]]:
        """Return the keys of shards that differ between meshes, by all ranks' values."""

    @abstractmethod
    def metadata(self) -> PlannedMetadata:
        """Return the metadata of another save, of which everything that may be changed is its own."""


class PlannedMetadata(Metadata, ABC):
    """Metadata of a planned save. Pickled, it is a Metadata without the tensors."""

    @property
    @abstractmethod
    def key_count(self) -> int: ...

    @abstractmethod
    def place(self, ranks: Sequence[PlacedItems]) -> None:
        """Note where the ranks have stored the items of their plans."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Return the sizes of the data files by name."""

    @abstractmethod
    def to_publish(self, path: str, summary: Summary | None) -> bytes:
        """Return the bytes of `.metadata`.

        Raises:
            MetadataError: no load could read it.
        """

    @abstractmethod
    def plain(self) -> Metadata:
        """Return DCP's own metadata."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_tensors, (self.storage_meta,)


def _without_tensors(storage_meta: StorageMeta | None) -> Metadata:
    return Metadata({}, storage_meta=storage_meta)


class PlanOfItems(GlobalPlan):
    def __init__(
        self,
        plans: Sequence[SavePlan],
        metadata: Metadata,
        compared_keys: Sequence[ComparedKeys] = (),
        place_warning: str = "",
        compared_shards: Sequence[ComparedShards] = (),
    ) -> None:
        self._compared_shards = compared_shards
        shared: dict[ComparedKeys, ComparedKeys] = {}
        self.place_warning = place_warning
        self.compared_keys = [shared.setdefault(keys, keys) for keys in compared_keys]
        with collector_paused():
            self._indices = [tuple(item.index for item in plan.items) for plan in plans]
            self._items = _shared(metadata.state_dict_metadata)
        self._planner_data = metadata.planner_data
        self.is_settled = False

    @property
    def item_count(self) -> int:
        return sum(map(len, self._indices))

    def differing_shards(self, values: Sequence[array[int]]) -> dict[str, list[int]]:
        return differing_shards(self._compared_shards, values)

    def metadata(self) -> PlannedMetadata:
        with collector_paused():
            items = _own(self._items)
        paths = dict(self._planner_data) if type(self._planner_data) is dict else self._planner_data
        return _MetadataOfItems(items, planner_data=paths).planned(self)

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


class _MetadataOfItems(PlannedMetadata):
    _plan: PlanOfItems

    def planned(self, plan: PlanOfItems) -> _MetadataOfItems:
        self._plan = plan
        return self

    @property
    def key_count(self) -> int:
        return len(self.state_dict_metadata)

    def place(self, ranks: Sequence[PlacedItems]) -> None:
        self.storage_data = self._plan.storage_data(ranks)

    def files(self) -> dict[str, int]:
        return files_of(self)

    def to_publish(self, path: str, summary: Summary | None) -> bytes:
        if self._plan.is_settled:
            return settled_to_publish(self.plain(), path=path, summary=summary)
        made = publication(self, path=path, summary=summary)
        if made.settled is not None:
            self._plan.settle(made.settled)
        return made.data

    def plain(self) -> Metadata:
        return Metadata(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Metadata)})


def files_of(metadata: Metadata) -> dict[str, int]:
    """Return the sizes of the data files that metadata names, by name."""
    files = {value[0] for value in metadata.storage_data.values()}
    return {file.name: file.nbytes for file in starmap(DataFileRef, files)}


def key_count(metadata: Metadata) -> int:
    if isinstance(metadata, PlannedMetadata):
        return metadata.key_count
    return len(metadata.state_dict_metadata or ())  # a planner's may have none, which the commit refuses


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
