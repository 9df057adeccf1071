"""The planner of an asynchronous save: the user's, and nothing of the state is left in it once that is staged."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

__all__ = ["ReleasingPlanner", "wrapped"]

_KEY = "state"


def wrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict as `ReleasingPlanner` expects it: under one key.

    DCP asks of each value of the dict whether it is Stateful, which takes 34 us each. Here it finds one value.
    """
    return {_KEY: state_dict}


class ReleasingPlanner(SavePlanner):
    """Plans with another planner.

    Args:
        planner: the other planner.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self._planner: SavePlanner | None = planner

    @property
    def _inner(self) -> SavePlanner:
        assert self._planner is not None, "the state is staged, or the save has failed"
        return self._planner

    def release(self) -> None:
        """Let go of the planner, and with it of the state."""
        self._planner = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        state_dict = state_dict[_KEY]
        if "storage_meta" in inspect.signature(self._inner.set_up_planner).parameters:
            self._inner.set_up_planner(state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator)
        else:  # as planners were before there was such an argument; DCP still takes them
            self._inner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]

    def create_local_plan(self) -> SavePlan:
        return self._inner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self._inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | Any:
        return self._inner.resolve_data(write_item)
