"""What `load` gives DCP for a planner: each rank keeps its own plan, and only what has to be compared travels.

local     a rank plans, and sends an empty plan; the reader adds which save it saw
global    the coordinator compares these; what it has no place for itself goes out with the plans, which is little
after     if there was any, each rank says which of it has a place there, and the coordinator warns of the rest

DCP sends every plan to the coordinator and back, though its global step changes none: at 512 ranks of 1,000 shards that
is 66 MB to unpickle and pickle again. A planner of another class may change plans, and a reader of another class may
look at them: if any rank has one, the plans of all ranks travel.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_nvcomp.calls.values import unwrapped
from dcp_nvcomp.errors import CheckpointError, CheckpointReplacedError, ConfigurationError
from dcp_nvcomp.loading.planner import WholeTensorPlanner
from dcp_nvcomp.loading.sharing.replicas import Replicas


class Seen(NamedTuple):
    save_id: str | None  # id of the save; None if the checkpoint has none, as those of stock DCP
    place: str  # path or URL, without passwords


def check_same_save(plans: Sequence[LoadPlan], path: str) -> None:
    seen: list[Seen] = [plan.storage_data for plan in plans]
    saves, places = sorted({str(one.save_id) for one in seen}), sorted({one.place for one in seen})
    if len(saves) < 2:
        return
    if len(places) > 1:
        raise ConfigurationError(
            f"The ranks load different checkpoints, {places[0]!r} and {places[1]!r}: give all ranks the same path. "
            "If these are names of one place, another save replaced the checkpoint there: load again."
        )
    raise CheckpointReplacedError(
        f"Another save replaced the checkpoint during the load (saves {saves}): load again.", path=path
    )


@dataclass(frozen=True)
class SomeKeys:
    """Some keys of a checkpoint, a bit for each in the order of its metadata, which all ranks have."""

    bits: bytes

    @staticmethod
    def of(keys: Collection[str], metadata: Metadata) -> SomeKeys:
        mask = np.fromiter((key in keys for key in metadata.state_dict_metadata), np.bool_)
        return SomeKeys(zlib.compress(np.packbits(mask).tobytes()))

    def names(self, metadata: Metadata) -> list[str]:
        """Return the keys."""
        count = len(metadata.state_dict_metadata)
        mask = np.unpackbits(np.frombuffer(zlib.decompress(self.bits), np.uint8), count=count).tolist()
        return [key for key, bit in zip(metadata.state_dict_metadata, mask, strict=True) if bit]


class LocalPlanner:
    """Plans a load into what lies under one key, as another planner does."""

    def __init__(
        self, planner: LoadPlanner, failure: CheckpointError | None, *, stays: bool, replicas: Replicas | None = None
    ) -> None:
        self._planner, self._replicas = planner, replicas
        self._stays = stays  # whether the plans of all ranks stay where they are
        self.failure = failure
        self.unplaced: SomeKeys | None = None  # what the coordinator has no place for; the same on all ranks
        self._metadata = Metadata({})
        self._plan: LoadPlan | None = None  # of this rank, if it stays here
        self._asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if self.failure is not None:
            raise self.failure
        self._planner.set_up_planner(unwrapped(state_dict), metadata, is_coordinator)
        self._metadata = metadata or self._metadata

    def create_local_plan(self) -> LoadPlan:
        plan = self._planner.create_local_plan()
        if not self._stays:
            return plan
        self._plan = plan
        return LoadPlan([])

    def create_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if self._plan is None:
            return self._planner.create_global_plan(plans)
        assert isinstance(self._planner, WholeTensorPlanner)
        unplaced = self._planner.unplaced(_keys_of(self._plan))
        if not unplaced:
            return plans
        told = SomeKeys.of(set(unplaced), self._metadata)
        return [replace(plan, planner_data=told) for plan in plans]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        with nullcontext() if self._replicas is None else self._replicas.expected(is_last=False):
            if self._plan is not None:
                self.unplaced = new_plan.planner_data
                new_plan = replace(self._plan, storage_data=new_plan.storage_data)
            self._asked = _keys_of(new_plan)
            return self._planner.finish_plan(new_plan)

    def placed(self) -> SomeKeys:
        """Return which of the unplaced keys have a place on this rank."""
        assert self.unplaced is not None
        return SomeKeys.of(self._asked.intersection(self.unplaced.names(self._metadata)), self._metadata)

    def warn_of_unplaced(self, placed: Sequence[SomeKeys]) -> None:
        """Warn of what has a place on no rank, if there is any."""
        if self.unplaced is None:
            return
        assert isinstance(self._planner, WholeTensorPlanner)
        found = {key for keys in placed for key in keys.names(self._metadata)}
        self._planner.warn_of_left({key for key in self.unplaced.names(self._metadata) if key not in found})


def _keys_of(plan: LoadPlan) -> set[str]:
    return {item.storage_index.fqn for item in plan.items}
