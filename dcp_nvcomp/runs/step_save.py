"""One save of a run, from the call of `save` until the step is in all its tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from dcp_nvcomp.runs.events import StepFailed, StepSaved, StepSkipped, TierName
from dcp_nvcomp.saving.stats import SaveStats


class StepSave:
    """A save of a run that is under way; made by `CheckpointManager.save`.

    Attributes:
        step: the step.
        number: which save of its manager this is, from 1 on; the same on all ranks.
        metrics: of the step.
        more: what else its summary says.
        staged: done when the state may change; that is so when `save` returns.
        saved: done when the step is in all its tiers, or was skipped. It has the error if it could not be saved on any
            rank.
        tiers: those it is in so far.
    """

    def __init__(
        self, step: int, number: int, metrics: Mapping[str, float], more: Mapping[str, Any] | None = None
    ) -> None:
        self.step, self.number, self.metrics, self.more = step, number, metrics, dict(more or {})
        self.staged: Future[None] = Future()
        self.saved: Future[StepSaved | StepSkipped] = Future()
        self.tiers: tuple[TierName, ...] = ()
        self.fast_ended = threading.Event()  # once it is in the fast tier, or is not
        self._lock = threading.Lock()
        self._parts = 1
        self._error: BaseException | None = None
        self._began_seconds = time.perf_counter()
        self._seconds: dict[TierName, float] = {}
        self._stall_seconds: float | None = None
        self._stats: SaveStats | None = None
        self._copied_nbytes = self._uploaded_nbytes = 0

    def returned(self) -> None:
        """Note that the caller goes on."""
        self._stall_seconds = time.perf_counter() - self._began_seconds

    @property
    def elapsed_seconds(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self._began_seconds

    def in_parts(self, count: int) -> None:
        """Say how many parts it has, which end at different times: in the fast tier with its copies, and the upload."""
        self._parts = count

    def part_ended(self, error: BaseException | None = None) -> bool:
        """Note that a part has ended.

        Args:
            error: why, if it failed.

        Returns:
            True if it was the last one.
        """
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            return self._parts == 0

    @property
    def error(self) -> BaseException | None:
        """Why the first part failed that did."""
        return self._error

    def reached(
        self, tier: TierName, *, stats: SaveStats | None = None, copied_nbytes: int = 0, uploaded_nbytes: int = 0
    ) -> None:
        """Note that the step is in another tier.

        Args:
            tier: the tier.
            stats: of the save, where it was encoded and written.
            copied_nbytes: what this rank received for it.
            uploaded_nbytes: what this rank sent for it.
        """
        with self._lock:
            self._stats = stats or self._stats
            self._copied_nbytes += copied_nbytes
            self._uploaded_nbytes += uploaded_nbytes
            self._seconds[tier] = time.perf_counter() - self._began_seconds
            self.tiers = (*self.tiers, tier)

    def finished(self) -> StepSaved:
        """Note that nothing more is to come, and return what to tell of it."""
        stats, stall = self._stats, self._stall_seconds
        if stall is None:  # the caller still waits for it
            stall = time.perf_counter() - self._began_seconds
        return StepSaved(
            self.step,
            self.tiers,
            stall,
            dict(self._seconds),
            0 if stats is None else stats.uncompressed_nbytes,
            0 if stats is None else stats.stored_nbytes,
            self._copied_nbytes,
            self._uploaded_nbytes,
            self.metrics,
        )

    def failed(self, error: BaseException) -> StepFailed:
        """Return what to tell if it failed."""
        return StepFailed(self.step, self.tiers, f"{type(error).__name__}: {error}")
