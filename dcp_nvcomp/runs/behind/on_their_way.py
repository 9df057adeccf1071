"""Which steps are on their way to the durable tier: training waits for them if there are too many."""

from __future__ import annotations

import threading

from dcp_nvcomp.runs.tiers.durable import DurableTier


class OnTheirWay:
    """The steps that a manager is bringing to the durable tier; they are not removed meanwhile, from either tier."""

    def __init__(self, durable: DurableTier) -> None:
        self._durable = durable
        self._changed = threading.Condition()
        self._steps: list[int] = []  # a step that is saved twice is there twice

    def __len__(self) -> int:
        with self._changed:
            return len(self._steps)

    @property
    def steps(self) -> frozenset[int]:
        """Those that are on their way now."""
        with self._changed:
            return frozenset(self._steps)

    def set_out(self, step: int) -> None:
        """Note that a step sets out."""
        self._durable.hold(step)
        with self._changed:
            self._steps.append(step)

    def arrive(self, step: int) -> None:
        """Note that a step is there, or won't be."""
        self._durable.let_go(step)
        with self._changed:
            self._steps.remove(step)
            self._changed.notify_all()

    def wait(self, most_waiting: int) -> None:
        """Wait until no more than this many are on their way."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._steps) <= most_waiting)
