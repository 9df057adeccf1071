"""Makes room in this node's part of the fast tier: what may go, and in which order.

1  torsos: steps that the last restore found complete nowhere
2  steps that are not newer than the newest of the durable tier, the oldest first

A complete step that is newer than all of the durable tier stays, whatever it costs, and so does what is being saved,
copied, or on its way there. Nothing goes before room is needed: a node that is away may come back with the rest of a
torso.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.runs.events import Event, StepsRemoved
from dcp_nvcomp.runs.tiers.fast import FastTier

logger = logging.getLogger(__name__)


class Room:
    """The room in a node's fast tier."""

    def __init__(self, fast: FastTier, awaited: Callable[[], Collection[int]], tell: Callable[[Event], None]) -> None:
        self._fast, self._awaited, self._tell = fast, awaited, tell
        self._lock = threading.Lock()
        self._torsos: frozenset[int] = frozenset()
        self._busy: Counter[int] = Counter()  # a step that is saved twice is there twice
        self._durable_step = -1

    def looked(self, complete: Collection[int]) -> None:
        """Note what a restore has seen, before it loads any of it: nothing is known to be whole yet."""
        try:
            here = self._fast.steps()
        except CheckpointError:  # nothing is removed then
            here = []
        with self._lock:
            self._torsos, self._durable_step = frozenset(here) - frozenset(complete), -1

    def restored(self, durable_step: int) -> None:
        """Note the newest step of the durable tier after a restore; -1 if there is none that is whole."""
        with self._lock:
            self._durable_step = durable_step

    def begun(self, step: int) -> None:
        """Note that a step is being saved here."""
        with self._lock:
            self._busy[step] += 1
            self._torsos -= {step}

    def ended(self, step: int) -> None:
        """Note that a step is saved and copied, or is not."""
        with self._lock:
            self._busy[step] -= 1

    def arrived(self, step: int) -> None:
        """Note that a step is in the durable tier."""
        with self._lock:
            self._durable_step = max(self._durable_step, step)

    def make(self, nbytes: float, *, but: Collection[int] = ()) -> bool:
        """Return whether so much fits, once what may go is gone, as far as it has to."""
        for step, why in self._removable(but):
            if self._fast.free_nbytes() > nbytes:
                return True
            if self._fast.remove([step]):
                logger.warning("The fast tier has too little room, so that step %d went: it is %s.", step, why)
                self._tell(StepsRemoved((step,), "fast"))
        return self._fast.free_nbytes() > nbytes

    def _removable(self, but: Collection[int]) -> Iterator[tuple[int, str]]:
        """Yield the steps that may go, in their order, and why; each is looked at anew, as saves go on meanwhile."""
        here = self._fast.steps()
        for step in here:
            with self._lock:
                may_go = step in self._torsos and not self._stays(step, but)
            if may_go:
                yield step, "complete nowhere"
        for step in here:
            with self._lock:
                may_go = step not in self._torsos and step <= self._durable_step and not self._stays(step, but)
            if may_go:
                yield step, "not newer than the durable tier's"

    def _stays(self, step: int, but: Collection[int]) -> bool:
        return step in but or self._busy[step] > 0 or step in self._awaited()
