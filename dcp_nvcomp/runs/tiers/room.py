"""Makes room in this node's part of the fast tier: what may go, and in which order.

1  torsos: steps that the last restore found complete nowhere
2  what a restore brought here from peers, which have it
3  steps that are not newer than the newest of the durable tier, the oldest first

A complete step that is newer than all of the durable tier stays, whatever it costs, and so does what is on its way
there. Nothing goes before room is needed: a node that is away may come back with the rest of a torso.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.runs.tiers.fast import FastTier

__all__ = ["Room"]

logger = logging.getLogger(__name__)


class Room:
    """The room in a node's fast tier.

    Args:
        fast: the fast tier.
        awaited: returns the steps that are on their way to the durable tier.
    """

    def __init__(self, fast: FastTier, awaited: Callable[[], Collection[int]]) -> None:
        self._fast, self._awaited = fast, awaited
        self._lock = threading.Lock()
        self._torsos: frozenset[int] = frozenset()
        self._fetched: dict[int, frozenset[str]] = {}
        self._durable_step = -1

    def restored(self, complete: Collection[int], durable_step: int) -> None:
        """Note what a restore found.

        Args:
            complete: the steps that are complete in the fast tiers of all nodes together, or are in the durable tier.
            durable_step: the newest of the durable tier; -1 if there is none.
        """
        try:
            here = self._fast.steps()
        except CheckpointError:  # nothing is removed then
            here = []
        with self._lock:
            self._torsos = frozenset(here) - frozenset(complete)
            self._durable_step = durable_step

    def fetched(self, step: int, names: Iterable[str]) -> None:
        """Note the files of a step that were brought here from peers, which still have them."""
        with self._lock:
            self._fetched[step] = self._fetched.get(step, frozenset()) | frozenset(names)

    def arrived(self, step: int) -> None:
        """Note that a step is in the durable tier."""
        with self._lock:
            self._durable_step = max(self._durable_step, step)

    def make(self, nbytes: float, *, but: Collection[int] = ()) -> bool:
        """Return whether so much fits, once what may go is gone, as far as it has to.

        Args:
            nbytes: how much.
            but: steps that stay.

        Raises:
            StorageError: it is not known how much room there is.
        """
        if self._fast.free_nbytes() > nbytes:
            return True
        for why, remove in self._removable(but).items():
            remove()
            logger.warning("The fast tier has too little room, so that %s went.", why)
            if self._fast.free_nbytes() > nbytes:
                return True
        return False

    def _removable(self, but: Collection[int]) -> Mapping[str, Callable[[], None]]:
        """Return what may go, in its order."""
        here = self._fast.steps()
        with self._lock:
            stays = {*but, *self._awaited()}
            torsos = [step for step in here if step in self._torsos and step not in stays]
            fetched = {step: names for step, names in self._fetched.items() if step in here and step not in stays}
            old = [step for step in here if step <= self._durable_step and step not in {*stays, *torsos}]
        found: dict[str, Callable[[], None]] = {}
        for step in torsos:
            found[f"step {step}, which is complete nowhere,"] = lambda step=step: self._remove(step)  # type: ignore[misc]
        for step, names in fetched.items():
            found[f"copies of other nodes' files of step {step}"] = lambda step=step, names=names: self._drop(
                step, names
            )  # type: ignore[misc]
        for step in old:
            found[f"step {step}, which is not newer than the durable tier's,"] = lambda step=step: self._remove(step)  # type: ignore[misc]
        return found

    def _remove(self, step: int) -> None:
        self._fast.remove([step])
        with self._lock:
            self._torsos -= {step}
            self._fetched.pop(step, None)

    def _drop(self, step: int, names: Iterable[str]) -> None:
        try:
            self._fast.open(step).remove(names)
        except CheckpointError as error:
            logger.warning("Copies of step %d could not be removed from the fast tier: %s", step, error)
        with self._lock:
            self._fetched.pop(step, None)
