"""One save of a run: where it has got to since the call of `save`, and how it is published as a step."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_nvcomp.calls.values import check_state_dict, try_values_of
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.metadata.summary import LEASE, REPLICA, RUN_SECONDS, SHARED_NBYTES, SHARES, Summary
from dcp_nvcomp.format.names import LARGEST_STEP, METADATA_NAME, REMOVING
from dcp_nvcomp.options import check_flag
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.runs.events import StepFailed, StepSaved, StepSkipped, TierName
from dcp_nvcomp.runs.options import check_count
from dcp_nvcomp.runs.retention import SavedStep
from dcp_nvcomp.runs.tiers.fast import TO_UPLOAD
from dcp_nvcomp.saving.commit import FinishedSave, WrittenSave, commit_checkpoint, data_files, to_publish
from dcp_nvcomp.saving.stats import SaveStats
from dcp_nvcomp.storage.base import Filesystem

_WORST_SUMMARY = Summary(
    *("0" * 32, 1.0e10 / 3, 10**7, 10**9, 10**18, 10**18, "0" * 32),
    more={
        TO_UPLOAD: True,
        REPLICA: "0" * 32,
        RUN_SECONDS: 1.0e10 / 3,
        LEASE: 10**12,
        SHARES: ["0" * 500],
        SHARED_NBYTES: 10**18,
    },
)


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
        self._stall_seconds = time.perf_counter() - self._began_seconds

    @property
    def elapsed_seconds(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self._began_seconds

    def in_parts(self, count: int) -> None:
        """Say how many parts it has, which end at different times: in the fast tier with its copies, and the upload."""
        self._parts = count

    def part_ended(self, error: BaseException | None = None) -> bool:
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            return self._parts == 0

    @property
    def error(self) -> BaseException | None:
        return self._error

    def reached(
        self, tier: TierName, *, stats: SaveStats | None = None, copied_nbytes: int = 0, uploaded_nbytes: int = 0
    ) -> None:
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
            0 if stats is None else stats.shared_nbytes,
            self._copied_nbytes,
            self._uploaded_nbytes,
            self.metrics,
        )

    def skipped(self, reason: str) -> StepSkipped:
        event = StepSkipped(self.step, reason)
        self.staged.set_result(None)
        self.saved.set_result(event)
        return event

    def failed(self, error: BaseException) -> StepFailed:
        return StepFailed(self.step, self.tiers, f"{type(error).__name__}: {error}")


def check_metrics(step: int, metrics: Mapping[str, float] | None) -> dict[str, float]:
    found = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:  # the last for a tensor of several elements
            raise ConfigurationError(f"metrics[{name!r}]={value!r} is not a number.") from error
        if not isinstance(name, str):
            raise ConfigurationError(f"The names of metrics are text, and {name!r} is not.")
        found[name] = number
    if dataclasses.replace(_WORST_SUMMARY, step=step, metrics=found).to_text() is None:
        raise ConfigurationError(f"metrics={list(found)!r} are too many for a checkpoint's summary of 4 KB.")
    return found


@dataclass
class StepPublisher:
    """Publishes a save as a step, by the plain commit."""

    step: int
    metrics: Mapping[str, float]
    check_lease: Callable[[], None] = lambda: None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, filesystem: Filesystem, save: FinishedSave) -> None:
        """Publish a save; raises what `commit_checkpoint` does, and RunInUseError if another manager has the run."""
        self.check_lease()
        commit_checkpoint(filesystem, self.named(save))

    def named(self, save: FinishedSave) -> FinishedSave:
        more = {**save.summary.more, **self.more}
        summary = dataclasses.replace(save.summary, step=self.step, metrics=dict(self.metrics), more=more)
        return dataclasses.replace(save, summary=summary)


@dataclass
class NodePublisher(StepPublisher):
    """Publishes a save on the coordinator's node, and holds what the other nodes publish."""

    durable_path: str = ""
    upload: bool = False
    replica_id: str = ""
    written: WrittenSave | None = field(default=None)  # what to publish on each node; None until it was published here

    def __call__(self, filesystem: Filesystem, save: FinishedSave) -> None:
        named = self.named(save)
        more = {**named.summary.more}
        if self.upload:
            more[TO_UPLOAD] = True
        if self.replica_id:
            more[REPLICA] = self.replica_id
        named = dataclasses.replace(named, summary=dataclasses.replace(named.summary, more=more))
        assert named.metadata.storage_meta is not None
        named.metadata.storage_meta.checkpoint_id = without_secrets(self.durable_path)
        data = to_publish(named.metadata, filesystem.location(METADATA_NAME), named.summary)
        filesystem.remove([REMOVING])
        filesystem.publish(METADATA_NAME, data)
        self.written = WrittenSave(data, save.save_id, data_files(save.metadata), ())


class RunProgress:
    """How far a run is, as its manager counts it. Steps only grow, so that a save pushes nothing out."""

    def __init__(self, newest: SavedStep | None, where: TierName, lease: int) -> None:
        self.step = None if newest is None else newest.step
        self._where = where
        self._is_unseen = True  # until a restore or a save
        self._saves, self._lease = 0, lease
        self.go_on_from(None if newest is None else newest.run_seconds)

    def go_on_from(self, seconds: float | None) -> None:
        self._before_seconds, self._start_seconds = seconds or 0.0, time.monotonic()

    def is_now(self, step: int | None) -> None:
        self.step, self._is_unseen = step, False

    def new_save(self, step: int, metrics: Mapping[str, float]) -> StepSave:
        self._saves += 1
        seconds = self._before_seconds + time.monotonic() - self._start_seconds
        return StepSave(step, self._saves, metrics, {RUN_SECONDS: round(seconds, 6), LEASE: self._lease})

    def checked(
        self, step: int, state: dict[str, Any], metrics: Mapping[str, float] | None, durable: bool
    ) -> tuple[dict[str, Any], dict[str, float], CheckpointError | None]:
        """Return the values of a state and the metrics; or why there are none, for which no rank must wait."""
        try:
            if check_count("step", step, least=0) > LARGEST_STEP:
                raise ConfigurationError(f"step={step} is larger than any step that ranks can agree on, 2**63 - 1.")
            check_flag("durable", durable)
            self.refuse_older(step)
            check_state_dict("save", state)
            known_metrics = check_metrics(step, metrics)
        except CheckpointError as error:
            return {}, {}, error
        values, failure = try_values_of(state)
        return values, known_metrics, failure

    def refuse_older(self, step: int) -> None:
        """Raise if a step would be pushed out by what the run has; one that was saved or restored may be replaced."""
        if self.step is None or step > self.step or (step == self.step and not self._is_unseen):
            return
        if self._is_unseen:
            raise ConfigurationError(
                f"Step {step} is not newer than step {self.step}, which this run has"
                f"{' in its fast tier' if self._where == 'fast' else ''}: call restore first, or save to another root."
            )
        raise ConfigurationError(
            f"Step {step} is older than step {self.step}, which this manager has restored or saved: steps only grow. "
            "restore(state, step=...) goes back to an earlier one; a phase that counts anew needs another root, or "
            "numbers that go on."
        )
