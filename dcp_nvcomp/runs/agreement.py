"""What all ranks of a run decide together, at the same step: that the job was told to end, that a save failed.

A rank notices such things on its own, at any time. What it knows is told to the others with the next call that all of
them make, and counts on all ranks from the same call on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcp_nvcomp.errors import RunInUseError
from dcp_nvcomp.runs.failures import Failures
from dcp_nvcomp.runs.lease import Lease
from dcp_nvcomp.runs.preemption import SignalWatch
from dcp_nvcomp.runs.ranks import Maximum, Ranks

__all__ = ["Agreement"]


class Agreement:
    """What the ranks agree on.

    Args:
        ranks: the ranks.
        signals: those that this rank was sent.
        failures: of saves behind training.
        lease: returns this rank's lease; None if another rank holds it.
        path: of the run, for messages.

    Attributes:
        is_preempted: True on all ranks once the job was told to end on any.
    """

    def __init__(
        self, ranks: Ranks, signals: SignalWatch, failures: Failures, lease: Callable[[], Lease | None], path: str
    ) -> None:
        self._ranks, self._signals, self._failures, self._lease, self._path = ranks, signals, failures, lease, path
        self._pending: Maximum | None = None
        self.is_preempted = False

    def beside_training(self) -> None:
        """Learn what the ranks told each other since the last call, and begin to tell what is known now.

        Nobody waits for a slower rank, but for the one that is a whole step behind.

        Raises:
            CheckpointError: a save failed; on all ranks at the same call.
            RunInUseError: another manager has taken the run over.
        """
        pending, self._pending = self._pending, self._ranks.begin_maximum(self._known())
        if pending is not None:
            self._follow(pending.wait())

    def now(self, *own: int) -> list[int]:
        """Agree at once.

        Args:
            *own: further values.

        Returns:
            The largest of all ranks of these.

        Raises:
            CheckpointError: a save failed; on all ranks at the same call.
            RunInUseError: another manager has taken the run over.
        """
        known = self._known()
        agreed = self._ranks.maximum([*known, *own])
        self._follow(agreed[: len(known)])
        return agreed[len(known) :]

    def _known(self) -> list[int]:
        """Return what this rank knows and the others may not."""
        lease = self._lease()
        return [int(self._signals.was_told), int(lease is not None and lease.is_lost), self._failures.newest]

    def _follow(self, agreed: Sequence[int]) -> None:
        told, lost, failed = agreed
        self.is_preempted = self.is_preempted or bool(told)
        if lost:
            lease = self._lease()
            if lease is not None:
                lease.check()
            raise RunInUseError("Another manager has taken this run over.", path=self._path)
        self._failures.raise_up_to(failed)
