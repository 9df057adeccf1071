"""The plans that this process keeps: found again by who saves together, the planner's options, and the structure.

A plan has an id, and is used again only if all ranks find the plan of one id: then each has the structure that it had
at that planning, from which the global plan follows. A `Structure` is what the plan of DCP's default planner depends
on: everything about a state but its values. Before a save the ranks `agree` whether all keep the same plan; what a rank
answers never decides what it plans, only whether all of them plan anew.

The coordinator keeps the `GlobalPlan`. A rank's write results name nothing that it knows: they are positions in the
rank's plan, and where these items were stored (`PlacedItems`).
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp_nvcomp.calls.ranks import Call, meet
from dcp_nvcomp.calls.values import PLAIN_TENSORS
from dcp_nvcomp.errors import RanksDifferError
from dcp_nvcomp.format.collector import collector_paused

_MAX_PLANS = 8
# An item takes about 500 bytes, and its name and place in a coordinator's global plan another 300.
_MAX_ITEMS = 1 << 20


@dataclass(frozen=True)
class PlanKey:
    ranks: tuple[int, ...]  # the global ranks that save together; empty without torch.distributed
    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True
    dedup_save_to_lowest_rank: bool = False


@dataclass(frozen=True)
class KeptPlan:
    plan_id: str
    key: PlanKey
    structure: Structure
    final: SavePlan
    everyones: GlobalPlan | None  # on the coordinator only

    @property
    def item_count(self) -> int:
        return len(self.final.items) + (0 if self.everyones is None else self.everyones.shard_count)


class KeptPlans:
    def __init__(self, max_plans: int = _MAX_PLANS, max_items: int = _MAX_ITEMS) -> None:
        self._plans: deque[KeptPlan] = deque(maxlen=max_plans)
        self._max_items = max_items
        self._lock = threading.Lock()

    def find(self, key: PlanKey, structure: Structure) -> KeptPlan | None:
        with self._lock:
            for plan in reversed(self._plans):
                if plan.key == key and plan.structure == structure:
                    return plan
        return None

    def keep(self, plan: KeptPlan) -> None:
        """Keep a plan, instead of that for the same structure and of the oldest ones; not one that is too large."""
        if plan.item_count > self._max_items:
            return
        with self._lock:
            for other in list(self._plans):
                if other.key == plan.key and other.structure == plan.structure:
                    self._plans.remove(other)
            self._plans.append(plan)
            while sum(kept.item_count for kept in self._plans) > self._max_items:
                self._plans.popleft()


@dataclass(frozen=True)
class Structure:
    """A state without its values; equal to another one if both have the same plan."""

    entries: tuple[tuple[Any, ...], ...]
    paths: Mapping[str, Any] | None
    needs_grad: bool


def structure_of(state: Mapping[str, Any], paths: Mapping[str, Any] | None) -> Structure | None:
    meshes: dict[int, tuple[Any, ...]] = {}
    entries = []
    needs_grad = torch.is_grad_enabled()
    with torch.no_grad():  # then a DTensor's shard is had without a node in the graph
        for fqn, value in state.items():
            if type(value) in PLAIN_TENSORS:
                entries.append((fqn, value.shape, *_properties(value)))
            elif type(value) is DTensor:
                mesh = meshes.get(id(value.device_mesh))
                if mesh is None:
                    mesh = meshes[id(value.device_mesh)] = _described(value.device_mesh)
                shard = value.to_local()
                entries.append(
                    (fqn, value.shape, mesh, value.placements, shard.shape, value.requires_grad, *_properties(shard))
                )
            elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
                return None
            else:
                entries.append((fqn,))
    return Structure(tuple(entries), paths, needs_grad)


def _properties(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_pinned()


def _described(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return what a plan depends on, without holding the mesh, and with it its process groups."""
    coordinate = mesh.get_coordinate()
    return (
        mesh.device_type,
        mesh.mesh_dim_names,
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        None if coordinate is None else tuple(coordinate),
    )


@dataclass(frozen=True)
class Proposal:
    kept_id: str | None  # of the plan that it keeps for its state
    may_keep: bool
    fresh_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def agree(mine: Proposal, group: dist.ProcessGroup | None, call: Call) -> tuple[bool, str | None]:
    proposals = meet(group, call, mine)
    if not all(proposal.may_keep for proposal in proposals):
        return False, None
    kept_ids = {proposal.kept_id for proposal in proposals}
    if len(kept_ids) == 1 and mine.kept_id is not None:
        return True, mine.kept_id
    return False, proposals[0].fresh_id


def check_same_place(plans: Sequence[SavePlan]) -> None:
    """Raise if the local plans of the ranks are for different places; planners may leave these out."""
    places: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, str):
            places.setdefault(plan.storage_data, rank)
    if len(places) > 1:
        said = ", ".join(f"{place!r} (rank {rank})" for place, rank in places.items())
        raise RanksDifferError(f"The ranks save with different values of path: {said}. Give all ranks the same.")


@dataclass(frozen=True)
class PlacedItems:
    files: tuple[tuple[Any, ...], ...]
    counts: tuple[int, ...]  # of items in each file
    positions: array[int]  # in the plan, file after file
    records: array[int]


class GlobalPlan:
    def __init__(
        self,
        plans: Sequence[SavePlan],
        metadata: Metadata,
        compared_keys: Sequence[tuple[str, ...]] = (),
        places: str = "",
    ) -> None:
        shared: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.places = places  # what was found of them
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
