"""Planners that raise at a chosen step, on a chosen rank: how tests make a save or load fail from the inside."""

from __future__ import annotations

import functools
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


# What is called for each item, and fails only when some have passed.
_FOR_EACH_ITEM = ("resolve_data", "resolve_tensor", "commit_tensor")


def _raising(planner: type, steps: tuple[str, ...]) -> Any:
    """Return the planner with methods of these names that raise where they are asked to."""

    def method_of(step: str) -> Any:
        @functools.wraps(getattr(planner, step))  # DCP looks at the signature
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            (self._fail_later_at if step in _FOR_EACH_ITEM else self._fail_at)(step)
            return getattr(planner, step)(self, *arguments, **options)

        return method

    return type(f"Raising{planner.__name__}", (_Failing, planner), {step: method_of(step) for step in steps})


class FailingSavePlanner(_raising(DefaultSavePlanner, SAVE_STEPS)):  # type: ignore[misc]
    """A default planner that raises at one of SAVE_STEPS."""


class FailingLoadPlanner(_raising(DefaultLoadPlanner, LOAD_STEPS)):  # type: ignore[misc]
    """A default planner that raises at one of LOAD_STEPS."""
