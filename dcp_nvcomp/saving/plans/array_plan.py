"""The plan that the ranks have computed, on their coordinator: its metadata is made of arrays.

A million shards are a dozen arrays and a few hundred layouts. DCP's metadata, an object for each shard, is made when
it is asked for (`plain`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp_nvcomp.format.metadata.paths import merged_paths
from dcp_nvcomp.format.metadata.publishable import arrays_to_publish
from dcp_nvcomp.format.metadata.rows import MetadataArrays, TensorShards, unfolded
from dcp_nvcomp.format.metadata.summary import Summary
from dcp_nvcomp.saving.plans.differences import place_words
from dcp_nvcomp.saving.plans.global_plan import GlobalPlan, PlacedItems, PlannedMetadata
from dcp_nvcomp.saving.plans.layouts import IrregularError
from dcp_nvcomp.saving.plans.shared_plan import SharedPlan, properties_of

Placed: TypeAlias = tuple[list[Any], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]

_SHARDS_OF_AN_ITEM = 16  # in memory: a few numbers each


class ArrayPlan(GlobalPlan):
    def __init__(self, plan: SharedPlan, order: Sequence[str], *, has_paths: bool) -> None:
        """Take a plan, with the keys of the coordinator's state in their order: so they come in the metadata.

        Raises:
            ConfigurationError: ranks have different keys that look alike in `.metadata`.
            IrregularError: ranks have a container and a value in the same place.
        """
        self.plan, self.place_warning = plan, ""
        _check_places(plan)
        self.is_settled = False  # True once metadata was published that a load can read
        self.compared_keys = [plan.compared_keys(rank) for rank in range(plan.rank_count)]
        numbers = {key: number for number, key in enumerate(plan.keys)}
        self._order = list(dict.fromkeys([*(numbers[key] for key in order), *range(len(plan.keys))]))
        self._keys = [plan.keys[key] for key in self._order]
        self.planner_data: dict[str, Any] | None = None
        if has_paths:
            merged = merged_paths([(part.paths, part.key_parts) for part in plan.parts], plan.keys)
            self.planner_data = {key: merged.pop(key) for key in self._keys} | merged
        known = {
            id(layout): TensorShards(properties_of(layout.properties), layout.shape, layout.offsets, layout.sizes)
            for layout in {id(layout): layout for layout in plan.layouts}.values()  # a few for all keys
            if layout.shape is not None
        }
        self._tensors = [known.get(id(plan.layouts[key])) for key in self._order]
        self._hints = [plan.hints[key] for key in self._order]

    @property
    def item_count(self) -> int:
        return self.plan.shard_count // _SHARDS_OF_AN_ITEM + sum(len(part.keys) for part in self.plan.parts)

    @property
    def key_count(self) -> int:
        return len(self._keys)

    def differing_shards(self, values: Sequence[array[int]]) -> dict[str, list[int]]:
        return self.plan.differing_shards(values)

    def metadata(self) -> PlannedMetadata:
        return _MetadataOfArrays(self)

    def placed(self, ranks: Sequence[PlacedItems]) -> Placed:
        """Return all files, and of each shard the number of its file and of its record, in the metadata's order."""
        plan, begin = self.plan, 0
        order, files = plan.plan_order(), list[Any]()
        file_numbers, records = np.empty(plan.shard_count, np.uint32), np.empty(plan.shard_count, np.uint32)
        for placed in ranks:
            end = begin + len(placed.positions)
            own = order[begin:end][np.frombuffer(placed.positions, f"u{placed.positions.itemsize}")]
            file_numbers[own] = len(files) + np.repeat(np.arange(len(placed.files)), placed.counts)
            records[own] = np.frombuffer(placed.records, f"u{placed.records.itemsize}")
            files += placed.files
            begin = end
        assert begin == plan.shard_count
        if self._order != list(range(len(self._order))):
            ordered = np.concatenate([np.arange(plan.starts[key], plan.starts[key + 1]) for key in self._order])
            file_numbers, records = file_numbers[ordered], records[ordered]
        return files, file_numbers, records

    def arrays(self, placed: Placed, storage_meta: StorageMeta, version: str | None) -> MetadataArrays:
        return MetadataArrays(self._keys, self._tensors, self._hints, self.planner_data, *placed, storage_meta, version)


class _MetadataOfArrays(PlannedMetadata):
    def __init__(self, plan: ArrayPlan) -> None:
        self._plan = plan
        self._placed: Placed | None = None
        self.storage_meta = None

    @property
    def key_count(self) -> int:
        return self._plan.key_count

    def place(self, ranks: Sequence[PlacedItems]) -> None:
        self._placed = self._plan.placed(ranks)

    def files(self) -> dict[str, int]:
        assert self._placed is not None
        return {name: nbytes for name, nbytes, *_ in self._placed[0]}

    def arrays(self) -> MetadataArrays:
        assert self._placed is not None and self.storage_meta is not None
        return self._plan.arrays(self._placed, self.storage_meta, self.version)

    def to_publish(self, path: str, summary: Summary | None) -> bytes:
        plan = self._plan
        data, plan.is_settled = arrays_to_publish(self.arrays(), path=path, summary=summary, is_settled=plan.is_settled)
        return data

    def __repr__(self) -> str:
        return f"<metadata of {self.key_count} keys>"

    def plain(self) -> Metadata:
        return unfolded(self.arrays())


def _check_places(plan: SharedPlan) -> None:
    if (plan.parts_of == plan.parts_of[0]).all():  # one nested state had them all
        return
    first = [int((plan.parts_of == number).any(1).argmax()) for number in range(len(plan.parts))]
    if place_words([part.paths for part in plan.parts], [part.empty for part in plan.parts], first):
        raise IrregularError("Ranks have a container and a value in the same place.")
