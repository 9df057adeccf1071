"""CheckpointManager: the checkpoints of a training run, from the first save to the restart on other machines."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist

from dcp_nvcomp.calls.ranks import Call, group_of
from dcp_nvcomp.calls.values import try_check
from dcp_nvcomp.engines.choice import warm_up
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, RankFailedError
from dcp_nvcomp.options import check_choice, check_flag, check_path, check_seconds, option_names
from dcp_nvcomp.runs.agreement import Agreement, Failures, RunCall, SignalWatch, number_of, ranks_of_run
from dcp_nvcomp.runs.background.pipeline import Pipeline
from dcp_nvcomp.runs.events import Event, EventEmitter, RunReport, StepDelayed, StepRestored, StepSkipped
from dcp_nvcomp.runs.options import REPLICAS, ForwardedOptions, RunContext, check_tiers, is_multiple, job_id
from dcp_nvcomp.runs.replicas import Replicas
from dcp_nvcomp.runs.restoring.restore import Restoring, newest_of
from dcp_nvcomp.runs.retention import Best, Keep, KeepRule, SavedStep
from dcp_nvcomp.runs.step_save import RunProgress, StepSave
from dcp_nvcomp.runs.steps import References, RunSteps, StepNames
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.nodes import nodes_of_run
from dcp_nvcomp.saving.plans.differences import OnDifference
from dcp_nvcomp.saving.save import end_sequence
from dcp_nvcomp.storage.open import real_place

logger = logging.getLogger(__name__)

_OnBacklog = Literal["wait", "skip"]


class CheckpointManager:
    """Save the steps of a training run, keep some of them, and restore the newest from wherever it is.

    Args:
        root: path or URL of the run: the durable tier. Its checkpoints are `<root>/step-<N>`, each like any other.
        every: save to the durable tier at each multiple of this step; step 0 is not saved.
        keep: which steps stay in the durable tier: a `Keep`, or a callable that is given the complete steps and returns
            those to keep. By default all. The newest stays in any case.
        fast: directory of the fast tier, on each node's own memory or disk, such as `"/dev/shm/alice/run-7"`; it
            must be the user's own. By default there is none, and saves go straight to the durable tier.
        fast_every: save to the fast tier at each multiple of this step.
        fast_keep: how many complete steps stay in the fast tier.
        copies: how many other nodes get a copy of what each node has in its fast tier. With `"replicas"` nothing is
            sent: each replica of a state that lies on several nodes (HSDP) saves it for itself.
        node: name of this rank's node; by default what torchrun says, else the name of the host.
        domain: what fails together with this node, such as its rack; by default the node. Copies go to other domains.
        asynchronous: if False, `save` returns when the step is in all its tiers.
        on_backlog: what happens to a save that is due for the durable tier while the last but one is still on its way
            there: it waits, or with `"skip"` it is not made, or goes to the fast tier only.
        run_id: id of this job, the same for all its restarts; by default `TORCHELASTIC_RUN_ID`. A job with the same id
            takes the run over at once, others have to wait until its lease has run out.
        take_over: if True, take the run from whoever holds it.
        lease_seconds: how long the run stays this job's if it dies, an hour at most; who takes it over then watches for
            half of that time whether it does live.
        step_template: name of a step's directory.
        preemption_signals: signals after which `should_save` asks for a last save.
        on_event: called with each event (`StepSaved`, `StepFailed`, ...), sometimes on a thread of the manager. An
            exception that it raises is logged.
        process_group: the ranks of the run; by default all.
        on_difference: what to do if ranks have different values under the same key: as for `save`.
        incremental: if True, a step does not write again what is the same in the one before, shard by shard: frozen
            weights, a tower that is not trained. It names the files of the step that has it, which stays as long as
            others need it. Turn it on where part of the state does not change; else each save takes longer by a look
            at it. Not with a fast tier.
        **options: of `NvcompWriter` and `NvcompReader`, and for the fsspec filesystem of `root`.

    Raises:
        ConfigurationError: an option can't work, or `root` is a checkpoint.
        RanksDifferError: not all ranks make a manager, or with other options.
        RunInUseError: another manager writes to this run.
        StorageError: the storage fails.

    Examples:
        >>> import tempfile, torch
        >>> from dcp_nvcomp import CheckpointManager, Keep
        >>> state = {"w": torch.zeros(3)}
        >>> run = tempfile.mkdtemp()
        >>> with CheckpointManager(run, every=10, keep=Keep(last=2)) as manager:
        ...     restored = manager.restore(state)
        ...     for step in range(restored.step + 1 if restored else 0, 41):
        ...         _ = state["w"].add_(1)
        ...         if manager.should_save(step):
        ...             _ = manager.save(step, state, metrics={"loss": 1 / step})
        >>> with CheckpointManager(run, every=10) as manager:
        ...     print([saved.step for saved in manager.steps()], manager.restore(state).step, state["w"])
        [30, 40] 40 tensor([41., 41., 41.])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int = 1000,
        keep: Keep | KeepRule | None = None,
        fast: str | os.PathLike[str] | None = None,
        fast_every: int | None = None,
        fast_keep: int = 2,
        copies: int | Literal["replicas"] = 0,
        node: str | None = None,
        domain: str | None = None,
        asynchronous: bool = True,
        on_backlog: _OnBacklog = "wait",
        run_id: str | None = None,
        take_over: bool = False,
        lease_seconds: float = 60.0,
        step_template: str = "step-{step}",
        preemption_signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        on_event: Callable[[Event], None] | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_difference: OnDifference = "warn",
        incremental: bool = False,
        **options: Any,
    ) -> None:
        check_tiers(every, fast, fast_every, fast_keep, copies)
        self._fast_every = fast_every
        check_seconds("lease_seconds", lease_seconds)
        self._asynchronous = check_flag("asynchronous", asynchronous)
        if check_flag("incremental", incremental) and fast is not None:
            raise ConfigurationError("incremental=True can't work with a fast tier, which has whole steps.")
        self._on_backlog = check_choice("on_backlog", on_backlog, _OnBacklog)
        if keep is not None and not callable(keep):
            raise ConfigurationError(f"keep={keep!r} must be a Keep, or a callable.")
        forwarded = ForwardedOptions.of(check_path(root), options, option_names(CheckpointManager))
        check_choice("on_difference", on_difference, OnDifference)
        names = StepNames(step_template)
        self._durable = DurableTier(check_path(root), names, forwarded.storage)
        limit_nbytes = forwarded.own_metadata_limit_nbytes
        self._fast = None if fast is None else FastTier(check_path(fast), names, metadata_limit_nbytes=limit_nbytes)

        self._group = group_of(process_group, no_dist=False)
        call = Call.of(
            "CheckpointManager",
            real_place(self._durable.root),
            every=every,
            keep=keep if isinstance(keep, Keep) else None,
            fast=fast is not None,
            fast_every=fast_every,
            fast_keep=fast_keep,
            copies=copies,
            asynchronous=asynchronous,
            on_backlog=on_backlog,
            step_template=step_template,
            on_difference=on_difference,
            incremental=incremental,
        )
        # without a fast tier the threads have no collectives: a save has groups of its own
        self._all_ranks = ranks_of_run(self._group, call, 1 if fast is None else 3)
        self._ranks, fast_ranks, durable_ranks = self._all_ranks * 3 if fast is None else self._all_ranks
        self._events = EventEmitter(on_event, logs=self._ranks.is_first)
        sent = 0 if isinstance(copies, str) else copies
        nodes = nodes_of_run(self._ranks, node, domain, sent)
        self._replicas = Replicas(self._ranks, nodes, self._group) if copies == REPLICAS else None
        self._failures = Failures()
        self._has_last_save, self._is_closed, self._made_up_for = False, False, 0
        try:
            there, lease_number = self._begin(run_id or job_id(), take_over, lease_seconds)
            newest, where = newest_of(there, self._ranks, nodes, self._fast, self._durable)
            self._signals = SignalWatch(preemption_signals)
        except BaseException:
            self._release()
            raise
        self._progress = RunProgress(newest, where, lease_number)
        self._agreement = Agreement(self._ranks, self._signals, self._failures, self._durable)
        emit = self._events.emit
        self._run = RunContext(
            nodes, self._fast, self._durable, keep, fast_keep, sent, every, emit, self._group, forwarded, on_difference
        )
        self._pipeline = Pipeline(fast_ranks, durable_ranks, self._run, there, self._failures)
        self._references = References(there) if incremental else None
        self._restoring = Restoring(self._ranks, self._run, self._pipeline, self._progress)
        warm_up(forwarded.writer.get("engine", "auto"))

    def _begin(self, run_id: str | None, take_over: bool, lease_seconds: float) -> tuple[RunSteps, int]:
        """Take the run; return the steps that are there, and the number of the lease."""

        def take() -> tuple[str, RunSteps, int]:
            taken = self._durable.take(run_id=run_id, lease_seconds=lease_seconds, take_over=take_over)
            assert self._durable.lease is not None
            return *taken, self._durable.lease.number

        run, there, number = self._ranks.on_first_at_length(take)  # it may watch another lease
        if (fast := self._fast) is not None:
            self._ranks.together(lambda: fast.claim(run))
        return there, number

    @property
    def preempted(self) -> bool:
        """True on all ranks once the job was told to end on any: after the next save, leave the loop."""
        return self._agreement.is_preempted

    def should_save(self, step: int) -> bool:
        """Return whether this step is to be saved: the same on all ranks, which all have to ask at each step.

        Args:
            step: the step of training that was just made.

        Raises:
            CheckpointError: an earlier save failed in the background; on all ranks at the same step.
            RunInUseError: another manager has taken the run over.
        """
        self._check_open()
        self._agreement.beside_training(RunCall("should_save", number_of(step)))
        if self._owes or (self.preempted and not self._has_last_save):
            return True
        return self._run.is_due(step) or is_multiple(step, self._fast_every)

    @property
    def _owes(self) -> bool:
        """True if a save that was due for the durable tier was lost in the fast one, and none has made up for it."""
        return self._agreement.lost > self._made_up_for

    def save(
        self, step: int, state: dict[str, Any], *, metrics: Mapping[str, float] | None = None, durable: bool = False
    ) -> StepSave:
        """Save a step; return when the state may change again.

        With a fast tier it goes there, and if it is due at this step (a multiple of `every`, or the job is told to
        end), from there to the durable tier. Without one, or if it does not fit, straight to the durable tier. A step
        that is there already is replaced.

        Args:
            step: the step of training that was just made.
            state: the state dict, as for `async_save`; the same keys at each save.
            metrics: of this step, for `Best` and lists; numbers by name.
            durable: if True, the step goes to the durable tier whether it is due there or not, and is not skipped: for
                what training ends with. On all ranks, if it is True on any.

        Returns:
            The save under way.

        Raises:
            ConfigurationError: the arguments can't work, or the step is older than one that this manager has restored
                or saved, or not newer than one that it has found; nothing was saved.
            CheckpointError: an earlier save failed in the background, and this one was not made; on all ranks. With
                `asynchronous=False` also: this one failed.
            RunInUseError: another manager has taken the run over.
        """
        self._check_open()
        values, known_metrics, failure = self._progress.checked(step, state, metrics, durable)
        call = RunCall("save", number_of(step))
        failed, no_room, backlogged, is_asked, unpublished = self._agreement.now(
            call,
            failure is not None,
            not self._pipeline.has_room(values),
            self._pipeline.on_their_way > 1,
            failure is None and bool(durable),
            self._pipeline.unpublished.certain,
        )
        if failed:
            raise failure or RankFailedError("A save was not begun, because another rank has no state for it.")
        self._pipeline.unpublished.remove(unpublished)
        save = self._progress.new_save(step, known_metrics)
        to_fast = self._fast is not None and not no_room and not self._owes
        is_last = self.preempted or bool(is_asked)
        due = is_last or not to_fast or self._run.is_due(step)
        if due and backlogged:
            if self._on_backlog == "wait" or is_last:  # the last save is never skipped
                start = time.perf_counter()
                self._pipeline.wait_for_uploads(1)
                self._events.emit(StepDelayed(step, time.perf_counter() - start))
            elif not to_fast:
                why = "earlier steps are still on their way to the durable tier: it was not saved"
                self._events.emit(save.skipped(why))
                return save
            else:
                due = False
                why = "earlier steps are still on their way: it goes to the fast tier only"
                self._events.emit(StepSkipped(step, why))
        self._progress.is_now(step)
        replica = self._replicas.replica_of(values, self._pipeline.wait) if self._replicas and to_fast else None
        self._restoring.go_back()
        if to_fast:
            self._pipeline.to_fast(save, values, replica, upload=due)
            if due and (is_last or not self._asynchronous):  # nothing comes later that could make up for it
                save = self._made_sure(save, call, values)
        else:
            self._to_durable(save, values)
        self._has_last_save = self._has_last_save or self.preempted
        if not self._asynchronous:
            save.saved.exception()  # only waits: what failed is raised on all ranks
            self._agreement.after(call)
        save.returned()
        return save

    def _to_durable(self, save: StepSave, values: dict[str, Any]) -> None:
        self._pipeline.to_durable(save, values, None if self._references is None else self._references.of(save.step))
        self._made_up_for = save.number

    def _made_sure(self, save: StepSave, call: RunCall, values: dict[str, Any]) -> StepSave:
        """Wait until a save is in the fast tier; if that is out of order, save straight to the durable one."""
        save.fast_ended.wait()
        if not self._asynchronous:
            save.saved.exception()  # the upload, which reads the fast tier, has ended too
        self._agreement.after(call)
        if self._agreement.lost < save.number:  # fine: it makes up for those before it
            self._made_up_for = max(self._made_up_for, save.number - 1)
            return save
        again = self._progress.new_save(save.step, save.metrics)
        self._to_durable(again, values)
        return again

    def steps(self) -> tuple[SavedStep, ...]:
        """Return the complete steps of the durable tier, in ascending order; lists the storage.

        Raises:
            StorageError: the storage fails.
        """
        return self._durable.list().complete

    def latest(self) -> SavedStep | None:
        """Return the newest complete step of the durable tier; None if there is none."""
        return next(reversed(self.steps()), None)

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> SavedStep | None:
        """Return the best complete step of the durable tier by a metric; None if no step has it."""
        steps = self.steps()
        found = Best(metric, mode).of(steps)
        return next((one for one in steps if one.step in found), None)

    def restore(self, state: dict[str, Any], step: int | None = None, *, fallback: bool = True) -> StepRestored | None:
        """Load a step into a state; by default the newest that is complete in any place. All ranks call this.

        Args:
            state: what to load into, with the keys that were saved.
            step: the step to load. If there are newer ones, the next save leaves them behind: they are no part of the
                run any more, and go where `keep` says what stays.
            fallback: if the newest step turns out damaged, warn and take the one before it; if False, raise.

        Returns:
            What was loaded, the same step on all ranks; None if there is nothing to load.

        Raises:
            CheckpointNotFoundError: there is no such step.
            CheckpointError: the load failed, or every step is damaged.
            RankFailedError: it failed on another rank.
        """
        self._check_open()
        failure = try_check("restore", state, alone=self._group is None)
        if any(self._agreement.come(RunCall("restore", number_of(step), bool(fallback)), failure is not None)):
            raise failure or RankFailedError("A restore was not begun, because another rank has no state for it.")
        if self._references is not None:  # if it fails, the steps may be damaged: the next save is whole
            self._references.go_on_from(None)
        event = self._restoring.restore(state, step, fallback=fallback)
        self._progress.is_now(None if event is None else event.step)
        if event is not None:
            self._events.emit(event)
        if self._references is not None:
            self._references.go_on_from(None if event is None else event.step)
        return event

    def report(self) -> RunReport:
        """Return what this manager did so far, on this rank."""
        return self._events.report()

    def wait(self) -> None:
        """Wait until all saves are in all their tiers.

        Raises:
            CheckpointError: one of them failed; on all ranks.
        """
        self._check_open()
        call = RunCall("wait")
        self._agreement.come(call)
        self._pipeline.wait()
        self._agreement.after(call)

    def close(self) -> None:
        """Wait for all saves, and give the run back.

        Raises:
            CheckpointError: a save failed, and no call has raised it yet.
        """
        if self._is_closed:
            return
        was_told = self._signals.was_told or self.preempted  # a signal that comes now asks for what was done
        try:
            self._pipeline.wait()  # if that is interrupted, the manager can be closed again
        finally:
            self._signals.close()  # not before: a signal that is repeated would end the process, and the last save
        self._is_closed = True
        self._release()
        try:
            self._failures.raise_up_to(self._failures.newest)
            self._failures.raise_lost(self._made_up_for)
        finally:
            if not was_told:
                self._signals.hand_on()

    def _release(self) -> None:
        self._durable.release()
        if self._replicas is not None:
            self._replicas.close()
        for ranks in self._all_ranks:
            ranks.close()
        if self._group is not None:
            end_sequence(self._group)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("A save failed as well: %s", failure)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError("This CheckpointManager is closed.")
