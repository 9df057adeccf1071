"""What happens in a run: one event for each thing, the report that sums them up, and who is given them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

logger = logging.getLogger(__name__)

TierName: TypeAlias = Literal["fast", "copies", "durable"]
Source: TypeAlias = Literal["own", "peer", "durable"]


@dataclass(frozen=True)
class StepSaved:
    """A step is in all tiers that it was to reach.

    Attributes:
        step: the step.
        tiers: those it is in.
        stall_seconds: how long `save` kept this rank waiting.
        seconds: from the call of `save` until the step was complete in a tier, by tier.
        uncompressed_nbytes: size of the state in memory; on other ranks than the first of this rank's part.
        stored_nbytes: size of the data files, likewise.
        shared_nbytes: size in memory of what is in files of earlier steps, likewise.
        copied_nbytes: what this rank received of other nodes' files.
        uploaded_nbytes: what this rank sent from the fast tier to the durable one.
        metrics: of the step.
    """

    step: int
    tiers: tuple[TierName, ...]
    stall_seconds: float
    seconds: Mapping[TierName, float]
    uncompressed_nbytes: int
    stored_nbytes: int
    shared_nbytes: int
    copied_nbytes: int
    uploaded_nbytes: int
    metrics: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """The size in memory of what was written over `stored_nbytes`; 1.0 if nothing was."""
        return (self.uncompressed_nbytes - self.shared_nbytes) / self.stored_nbytes if self.stored_nbytes else 1.0

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} after {self.seconds[tier]:.2f} s" for tier in self.tiers if tier in self.seconds)
        written_nbytes = self.uncompressed_nbytes - self.shared_nbytes
        shared = f" beside {self.shared_nbytes / 1e6:.2f} MB of earlier steps" if self.shared_nbytes else ""
        return (
            f"step {self.step}: {written_nbytes / 1e6:.2f} MB as {self.stored_nbytes / 1e6:.2f} MB (ratio "
            f"{self.ratio:.3f}){shared}, training waited {self.stall_seconds:.3f} s; {tiers}"
        )


@dataclass(frozen=True)
class StepFailed:
    """A step could not be saved, or not in all tiers.

    Attributes:
        step: the step.
        tiers: those it is in nevertheless.
        error: why.
    """

    step: int
    tiers: tuple[TierName, ...]
    error: str

    def __str__(self) -> str:
        where = f", but it is in these tiers: {', '.join(self.tiers)}" if self.tiers else ""
        return f"step {self.step} could not be saved: {self.error}{where}"


@dataclass(frozen=True)
class ReplicasDiffer:
    """Replicas of the state that should be equal were saved with different values.

    Attributes:
        step: the step.
        fqns: the tensors; small ones together with those that were stored in one block with them.
    """

    step: int
    fqns: tuple[str, ...]

    def __str__(self) -> str:
        more = f", and {len(self.fqns) - 3} more" if len(self.fqns) > 3 else ""
        return (
            f"step {self.step}: replicas differ in {', '.join(self.fqns[:3])}{more}: training has diverged, or a "
            "machine computes wrongly"
        )


@dataclass(frozen=True)
class StepSkipped:
    """A step was not saved, or not in one of its tiers.

    Attributes:
        step: the step.
        reason: why.
    """

    step: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


@dataclass(frozen=True)
class StepDelayed:
    """A step waited for earlier ones on their way to the durable tier: storage is slower than saves are frequent.

    Attributes:
        step: the step.
        seconds: how long training waited for that.
    """

    step: int
    seconds: float

    def __str__(self) -> str:
        return f"step {self.step} waited {self.seconds:.2f} s for earlier ones to get to the durable tier"


@dataclass(frozen=True)
class StepsRemoved:
    """Steps that nothing keeps are gone.

    Attributes:
        steps: the steps.
        tier: where they were.
    """

    steps: tuple[int, ...]
    tier: TierName

    def __str__(self) -> str:
        return f"removed from the {self.tier} tier: {', '.join(map(str, self.steps))}"


@dataclass(frozen=True)
class StepRestored:
    """A step was loaded.

    Attributes:
        step: the step.
        seconds: how long that took.
        files: how many files this rank's part came from, by source: `own` node, a `peer`, the `durable` tier.
        nbytes: size of these files, by source.
        damaged: steps that were tried before it and turned out damaged.
        metrics: of the step.
    """

    step: int
    seconds: float
    files: Mapping[Source, int] = field(default_factory=dict)
    nbytes: Mapping[Source, int] = field(default_factory=dict)
    damaged: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{count} files from {source}" for source, count in self.files.items() if count]
        return f"restored step {self.step} in {self.seconds:.2f} s: {', '.join(parts) or 'nothing for this rank'}"


Event: TypeAlias = StepSaved | StepFailed | StepSkipped | StepDelayed | ReplicasDiffer | StepsRemoved | StepRestored


@dataclass(frozen=True)
class RunReport:
    """What a manager did so far, on this rank.

    Attributes:
        saves: the last saves, at most a hundred.
        saved: how many steps were saved.
        failed: how many could not be.
        skipped: how many were skipped, or left out of a tier.
        delayed_seconds: how long saves waited for earlier ones on their way to the durable tier.
        removed: how many steps were removed, by tier.
        stall_seconds: how long all saves together kept training waiting.
        restored: the steps that were loaded.
        differing: the steps whose replicas differ.
    """

    saves: tuple[StepSaved, ...] = ()
    saved: int = 0
    failed: int = 0
    skipped: int = 0
    delayed_seconds: float = 0.0
    removed: Mapping[TierName, int] = field(default_factory=dict)
    stall_seconds: float = 0.0
    restored: tuple[StepRestored, ...] = ()
    differing: tuple[int, ...] = ()

    def after(self, event: Event) -> RunReport:
        """Return the report after another event."""
        values = dict(vars(self))
        if isinstance(event, StepSaved):
            values["saves"] = (*self.saves, event)[-100:]
            values["saved"] += 1
            values["stall_seconds"] += event.stall_seconds
        elif isinstance(event, StepFailed):
            values["failed"] += 1
        elif isinstance(event, StepSkipped):
            values["skipped"] += 1
        elif isinstance(event, StepDelayed):
            values["delayed_seconds"] += event.seconds
        elif isinstance(event, ReplicasDiffer):
            values["differing"] = (*self.differing, event.step)
        elif isinstance(event, StepsRemoved):
            values["removed"] = {**self.removed, event.tier: self.removed.get(event.tier, 0) + len(event.steps)}
        else:
            values["restored"] = (*self.restored, event)
        return RunReport(**values)


class EventEmitter:
    """Gives events to the report, the log, and the user's callback, from any thread."""

    def __init__(self, on_event: Callable[[Event], None] | None, *, logs: bool) -> None:
        self._on_event, self._logs = on_event, logs
        self._report, self._lock = RunReport(), threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._report = self._report.after(event)
        if self._logs:
            logger.info("%s", event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception as error:
                logger.error("on_event raised %s: %s", type(error).__name__, error)

    def report(self) -> RunReport:
        with self._lock:
            return self._report
