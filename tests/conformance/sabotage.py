"""Planners that raise at a chosen step, on a chosen rank: how tests make a save or load fail from the inside."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

SAVE_STEPS = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
LOAD_STEPS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_tensor",
    "commit_tensor",
)


class Sabotage(Exception):
    """The failure that a test has asked for."""


class Unsaveable:
    """An object that raises when it is pickled."""

    def __reduce__(self) -> Any:
        raise Sabotage("pickling")


class _Failing:
    """Raises in the method named `step`; in those that are called for each item, when `survivors` have passed."""

    def __init__(self, step: str, *, rank: int = 0, survivors: int = 2) -> None:
        super().__init__()
        self.step = step
        self.rank = rank
        self.survivors = survivors

    def _fail_at(self, step: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if step == self.step and rank == self.rank:
            raise Sabotage(step)

    def _fail_later_at(self, step: str) -> None:
        if step == self.step:
            self.survivors -= 1
            if self.survivors < 0:
                self._fail_at(step)


class FailingSavePlanner(_Failing, DefaultSavePlanner):
    """A default planner that raises at one of SAVE_STEPS."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._fail_at("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self._fail_at("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._fail_at("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self._fail_at("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._fail_later_at("resolve_data")
        return super().resolve_data(write_item)


class FailingLoadPlanner(_Failing, DefaultLoadPlanner):
    """A default planner that raises at one of LOAD_STEPS."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self._fail_at("set_up_planner")
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> Any:
        self._fail_at("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: Any) -> Any:
        self._fail_at("create_global_plan")
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: Any) -> Any:
        self._fail_at("finish_plan")
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self._fail_at("load_bytes")
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: Any) -> Any:
        self._fail_later_at("resolve_tensor")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self._fail_later_at("commit_tensor")
        super().commit_tensor(read_item, tensor)
