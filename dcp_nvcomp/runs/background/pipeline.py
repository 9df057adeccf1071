"""What happens to a save in the background: each rank has a thread for the fast tier and one for the durable tier.

A save that goes straight to the durable tier has its place on the durable thread, so steps are published in order. Both
threads do the same jobs in the same order on all ranks, each with process groups of its own, and each stage ends with
an exchange of whether it worked. An error of the fast tier's storage is no failure of the run: the step is lost from
that tier, and if it was due in the durable one, the next save makes up for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from dcp_nvcomp.calls.values import leaves
from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.runs.agreement import Failures, Ranks
from dcp_nvcomp.runs.background.stages import Background, DurableStage, FastStage, OnTheirWay
from dcp_nvcomp.runs.background.unpublished import Unpublished
from dcp_nvcomp.runs.events import StepSkipped
from dcp_nvcomp.runs.options import RunContext
from dcp_nvcomp.runs.own_files import LeftBehind
from dcp_nvcomp.runs.replicas import Replica, written_by
from dcp_nvcomp.runs.step_save import NodePublisher, StepPublisher, StepSave
from dcp_nvcomp.runs.steps import RunSteps
from dcp_nvcomp.runs.tiers.fast import Room
from dcp_nvcomp.runs.tiers.uploads import SourceError
from dcp_nvcomp.saving.asynchronous.upload_future import UploadFuture
from dcp_nvcomp.saving.commit import WrittenSave
from dcp_nvcomp.saving.save import AsyncSave, async_save
from dcp_nvcomp.saving.stats import SaveStats
from dcp_nvcomp.saving.writer import NvcompWriter

logger = logging.getLogger(__name__)

_SPARE = 1.1  # the next step may be a little larger than the last
_Note = Callable[[int, BaseException], None]


class Pipeline:
    def __init__(
        self, fast_ranks: Ranks, durable_ranks: Ranks, run: RunContext, there: RunSteps, failures: Failures
    ) -> None:
        self._fast_ranks, self._run, self._emit, self._failures = fast_ranks, run, run.emit, failures
        self._fast, self._durable = run.fast, run.durable
        self._warns = fast_ranks.is_first
        self._on_their_way = OnTheirWay(run.durable)
        self._durable_stage = DurableStage(durable_ranks, run, there)
        self.unpublished = Unpublished()
        self._durable_thread = Background("dcp-run-durable", _unexpected)
        self._fast_stage: FastStage | None = None
        self._fast_thread: Background | None = None
        self.room: Room | None = None
        self._expected_nbytes = 0.0  # of the next step, on this node, with copies
        if run.fast is not None:
            self.room = Room(run.fast, lambda: self._on_their_way.steps, run.emit)
            self._fast_stage = FastStage(fast_ranks, run, run.fast, self._on_their_way)
            self._fast_thread = Background("dcp-run-fast", _unexpected)

    @property
    def on_their_way(self) -> int:
        return len(self._on_their_way)

    def wait_for_uploads(self, most_waiting: int) -> None:
        self._on_their_way.wait(most_waiting)

    def has_room(self, values: Mapping[str, Any]) -> bool:
        """Return whether the next step and copies fit this node's fast tier; one rank of it looks, and makes room."""
        if self._fast is None or not self._run.nodes.is_leader:
            return True
        assert self._fast_stage is not None and self.room is not None
        expected: float = self._fast_stage.step_nbytes
        if not expected:
            here = len(self._run.nodes.ranks_of(self._run.nodes.own))
            expected = state_nbytes(values) * here * (1 + self._run.copies)
        self._expected_nbytes = _SPARE * expected
        try:
            self._fast.check_writable()
            return self.room.make(self._expected_nbytes)
        except CheckpointError as error:
            logger.warning("The fast tier is out of order: %s", error)
            return False

    def to_fast(self, save: StepSave, values: dict[str, Any], replica: Replica | None, *, upload: bool) -> None:
        assert self._fast is not None and self._fast_stage is not None and self.room is not None
        path, durable_path = self._fast.path_of(save.step), self._durable.path_of(save.step)
        publisher = NodePublisher(save.step, save.metrics, more=save.more, durable_path=durable_path, upload=upload)
        group = self._run.group
        replicas: tuple[tuple[int, ...], ...] = ()
        if replica is not None:
            values, group, replicas = replica.values, replica.group, replica.all
            publisher.replica_id = replica.id
        writer = self._run.options.fast_writer(path)
        writer.published_by(publisher)
        with self._durable.held(save.step):  # not while it is removed
            with contextlib.suppress(StorageError):  # the writer fails for the same, on all ranks
                self._fast.make_directory(save.step)
            # before anything of it is written; what the first step comes to is a guess
            self.room.begun(save.step, self._expected_nbytes if self._fast_stage.step_nbytes else 0)
            try:
                saving = self._begin(save, values, writer, group)
            except BaseException:
                self.room.ended(save.step)
                raise
            self._follow_fast(save, saving, publisher, upload=upload, replicas=replicas)

    def to_durable(self, save: StepSave, values: dict[str, Any], references: Collection[int] | None = None) -> None:
        """Save a step to the durable tier; `references` are those with which it may share files, None to share none."""
        if self._fast is not None:
            self._tell_of_lack_of_room(save)
        places = None if references is None else [self._durable.path_of(step) for step in references]
        writer = self._run.options.durable_writer(self._durable.path_of(save.step), places)
        writer.published_by(StepPublisher(save.step, save.metrics, self._durable.check_lease, save.more))
        with contextlib.ExitStack() as held:
            for step in (save.step, *(references or ())):
                held.enter_context(self._durable.held(step))
            saving = self._begin(save, values, writer, self._run.group)
            self._on_their_way.add(save.step)
            # the references until this save is published, or has failed
            still_held = held.pop_all()
            self._durable_thread.do(lambda: self._end_direct(save, saving, writer, still_held))

    def _tell_of_lack_of_room(self, save: StepSave) -> None:
        if self._warns:
            self._warns = False
            logger.warning(
                "The fast tier of a node has too little room for step %d and for later ones, or is out of order: until "
                "that changes they go to the durable tier.",
                save.step,
            )
        self._emit(
            StepSkipped(save.step, "the fast tier has too little room, or is out of order: it goes to the durable tier")
        )

    def _begin(
        self, save: StepSave, values: dict[str, Any], writer: NvcompWriter, group: dist.ProcessGroup | None
    ) -> AsyncSave:
        saving = async_save(
            values,
            writer.path,
            storage_writer=writer,
            process_group=group,
            no_dist=group is None,
            on_difference=self._run.on_difference,
        )
        # what fails in the background is raised by the manager: the next save need not refuse for it
        cast(UploadFuture, saving.upload_completion).was_looked_at = True
        save.staged.set_result(None)
        return saving

    def _follow_fast(
        self,
        save: StepSave,
        saving: AsyncSave,
        publisher: NodePublisher,
        *,
        upload: bool,
        replicas: Sequence[Sequence[int]] = (),
    ) -> None:
        assert self._fast_thread is not None and self.room is not None
        room = self.room
        if upload:
            save.in_parts(2)
            self._on_their_way.add(save.step)

        def follow() -> None:
            try:
                self._end_fast(save, saving, publisher, replicas, upload=upload)
            finally:
                room.ended(save.step)

        self._fast_thread.do(follow)

    def upload(self, save: StepSave, written: WrittenSave, senders: Mapping[str, int]) -> None:
        self._on_their_way.add(save.step)
        self._durable_thread.do(lambda: self._end_upload(save, written, senders))

    def plan_to_go_back(self, is_planned: bool) -> None:
        self._durable_stage.is_going_back = is_planned

    def go_back(self, left: LeftBehind) -> None:
        self._durable_stage.is_going_back = False
        self._durable_stage.leave_behind(left.durable)
        if self._fast_stage is not None:
            self._fast_stage.leave_behind(left.on_nodes)

    def remember_fast(self, steps: Collection[int]) -> None:
        assert self._fast_stage is not None
        self._fast_stage.remember(steps)

    def wait(self) -> None:
        if self._fast_thread is not None:
            self._fast_thread.wait_for()
        self._durable_thread.wait_for()

    def _end_direct(self, save: StepSave, saving: AsyncSave, writer: NvcompWriter, held: contextlib.ExitStack) -> None:
        def note() -> None:
            with held:
                if saving.upload_completion.exception() is not None:
                    self.unpublished.failed(save.number, writer)
            save.reached("durable", stats=_stats(saving.upload_completion.result()))
            self._durable_stage.note(save)

        self._end_durable(save, _error_of(note))

    def _end_upload(self, save: StepSave, written: WrittenSave, senders: Mapping[str, int]) -> None:
        error = _error_of(lambda: self._durable_stage.upload(save, written, senders))
        self._end_durable(save, error, self._note_of(save, error, SourceError, is_due=True))

    def _end_durable(self, save: StepSave, error: BaseException | None, note: _Note | None = None) -> None:
        self._on_their_way.done(save.step)
        if "durable" in save.tiers and self.room is not None:
            self.room.arrived(save.step)
        self._end_part(save, error, note)
        self._durable_stage.prune()

    def _end_fast(
        self,
        save: StepSave,
        saving: AsyncSave,
        publisher: NodePublisher,
        replicas: Sequence[Sequence[int]],
        *,
        upload: bool,
    ) -> None:
        assert self._fast_stage is not None and self.room is not None
        try:
            # the save of another replica may have failed, or this one's, of which the other does not know
            stats = self._fast_ranks.together(lambda: _stats(saving.upload_completion.result()))
            parts = written_by(self._fast_ranks, replicas, publisher.written, save.elapsed_seconds)
            own = next(one for one in parts if self._fast_ranks.rank in one.ranks)
            self._fast_stage.publish(save.step, own)
            self.room.expects(save.step, self._fast_stage.nbytes_here(own))
            save.reached("fast", stats=stats)
        except BaseException as error:
            if upload:
                self._on_their_way.done(save.step)
                save.in_parts(1)
            self._end_part(save, error, self._note_of(save, error, StorageError, is_due=upload))
            return
        finally:
            save.fast_ended.set()
        if upload:
            first = min(parts, key=lambda one: one.seconds)  # the ranks with the least to do besides
            self._durable_thread.do(lambda: self._end_upload(save, first.written, first.senders()))
        fast_stage = self._fast_stage
        self._end_part(save, _error_of(lambda: fast_stage.secure(save, parts, own)))

    def _note_of(
        self, save: StepSave, error: BaseException | None, of_fast_tier: type[StorageError], *, is_due: bool
    ) -> _Note:
        """Return what notes an error: that the fast tier is out of order is no failure of the run."""
        if not isinstance(error, of_fast_tier):
            return self._failures.note
        then = "The next save goes straight to the durable tier" if is_due else "It is not saved"
        logger.warning("The fast tier lost step %d. %s: %s", save.step, then, error)
        return self._failures.note_lost if is_due else _leave_at_event

    def _end_part(self, save: StepSave, error: BaseException | None, note: _Note | None = None) -> None:
        """Note that a part of a save has ended, and emit an event of the save if it was the last."""
        if error is not None:
            self._emit(save.failed(error))
            (note or self._failures.note)(save.number, error)
        if not save.part_ended(error):
            return
        if save.error is not None:
            save.saved.set_exception(save.error)
        else:
            event = save.finished()
            self._emit(event)
            save.saved.set_result(event)


def _leave_at_event(number: int, error: BaseException) -> None:
    """Leave it at the event and the log."""


def _error_of(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


def _stats(metadata: Metadata) -> SaveStats | None:
    return SaveStats.of(metadata)


def _unexpected(error: BaseException) -> None:
    logger.error("A checkpoint manager's thread failed: %s: %s", type(error).__name__, error)


def state_nbytes(values: Mapping[str, Any]) -> int:
    tensors = (value for value in leaves(values) if isinstance(value, torch.Tensor))
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
    return sum(one.numel() * one.element_size() for one in local)  # `nbytes` raises for sparse ones
