"""What happens to a step in a tier, once all ranks have written it. All ranks call this at the same steps."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.format.names import METADATA_NAME, REMOVING
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.runs.events import ReplicasDiffer, StepsRemoved
from dcp_nvcomp.runs.options import RunContext
from dcp_nvcomp.runs.own_files import write_kept
from dcp_nvcomp.runs.replicas import WrittenPart, compared
from dcp_nvcomp.runs.retention import Keep, KeepRule, SavedStep
from dcp_nvcomp.runs.step_save import StepSave
from dcp_nvcomp.runs.steps import RunSteps
from dcp_nvcomp.runs.tiers.durable import BEGUN, DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.nodes import move_files
from dcp_nvcomp.runs.tiers.uploads import upload_files
from dcp_nvcomp.saving.commit import LastPublished, WrittenSave, commit_files

logger = logging.getLogger(__name__)


class FastStage:
    """The fast tier's part of a manager's work in the background."""

    def __init__(self, ranks: Ranks, run: RunContext, fast: FastTier, on_their_way: OnTheirWay) -> None:
        self._ranks, self._nodes, self._fast, self._keep_count = ranks, run.nodes, fast, run.fast_keep
        self._on_their_way, self._emit = on_their_way, run.emit
        self._transfers = run.nodes.copies(run.copies)  # to peers, after each save
        self._complete: list[int] = []
        self._differing: list[int] = []  # whose replicas differ, since the last one that was copied
        self._has_said_so = False
        self.step_nbytes = 0  # what the last step took on this node

    def remember(self, steps: Collection[int]) -> None:
        self._complete = sorted({*self._complete, *steps})

    def leave_behind(self, steps: Collection[int]) -> None:
        self._complete = [step for step in self._complete if step not in steps]
        if not self._nodes.is_leader:
            return
        try:
            awaited = self._on_their_way.steps  # an upload that goes on since the restore
            self._fast.remove([step for step in self._fast.steps() if step in steps and step not in awaited])
        except CheckpointError as error:
            logger.warning("The fast tier can't be listed: %s", error)

    def publish(self, step: int, part: WrittenPart) -> None:
        def publish_here() -> None:
            if self._nodes.is_leader and self._nodes.own != self._nodes.node_of(part.ranks[0]):
                filesystem = self._fast.open(step)
                filesystem.remove([REMOVING])
                filesystem.publish(METADATA_NAME, part.written.data)

        self._ranks.together(publish_here)

    def secure(self, save: StepSave, parts: Sequence[WrittenPart], own: WrittenPart) -> None:
        """See to it that a step outlives a node; then let older ones go."""
        self.step_nbytes = self.nbytes_here(own)
        try:
            is_copied = self._secured(save, parts, own)
        except StorageError as error:  # the step is there, and older ones stay beside it
            self._emit(save.failed(error))
            logger.warning("Step %d has no copies: the fast tier of a node is out of order: %s", save.step, error)
            return
        if is_copied:
            self._prune(save.step)
        else:
            self._prune_differing(save.step)

    def _secured(self, save: StepSave, parts: Sequence[WrittenPart], own: WrittenPart) -> bool:
        if len(parts) > 1:
            return self._compare(save, parts, own)
        copied_nbytes = self._copy(save.step, own)
        if self._transfers:
            save.reached("copies", copied_nbytes=copied_nbytes)
        return True

    def _compare(self, save: StepSave, parts: Sequence[WrittenPart], own: WrittenPart) -> bool:
        """Return False if the replicas saved different values, as far as they divided the state alike."""
        replicas = [one.ranks for one in parts]
        found = compared(self._ranks, replicas, self._fast.open(save.step), own.files_of(self._ranks.rank))
        if found.differing:
            self._emit(ReplicasDiffer(save.step, found.differing))
            return False
        if found.is_complete:

            def mark() -> None:
                if self._nodes.is_leader:
                    self._fast.mark_equal(save.step, own.written.save_id)

            self._ranks.together(mark)
        elif not self._has_said_so and self._ranks.is_first:
            self._has_said_so = True
            logger.warning("The replicas divide the state differently, so that their checksums can't be compared.")
        save.reached("copies")
        return True

    def _copy(self, step: int, part: WrittenPart) -> int:
        """Send this rank's files to its peers; return what it received."""
        if not self._transfers:
            return 0
        transfers = {one: part.files_of(one.source) for one in self._transfers}
        here = self._fast.open(step)
        moved = move_files(self._ranks, transfers, here, here)
        for one in self._ranks.gather(moved):  # of what a peer can't read the receiver only sees that it is wrong
            for error in (*one.unread.values(), *one.unwritten.values()):
                raise StorageError(f"A copy could not be made: {error}")
        return sum(moved.received.values())

    def nbytes_here(self, part: WrittenPart) -> int:
        """Return how much of a save is on this node: what its ranks wrote, and the copies that they receive."""
        own = self._nodes.ranks_of(self._nodes.own)
        sources = [*own, *(one.source for one in self._transfers if one.to in own)]
        return sum(sum(part.files_of(rank).values()) for rank in sources)

    def _prune(self, step: int) -> None:
        """Remove what is older than the steps that stay, once the copies of a step are made."""
        self.remember([step])
        self._differing = []
        self._complete = self._complete[-self._keep_count :]
        if len(self._complete) < self._keep_count or not self._nodes.is_leader:
            return
        gone = self._fast.remove_before(self._complete[0], but=self._on_their_way.steps)
        if gone:
            self._emit(StepsRemoved(gone, "fast"))

    def _prune_differing(self, step: int) -> None:
        """Remove older steps whose replicas differ, so that these do not fill the memory; equal ones stay."""
        self._differing.append(step)
        awaited = self._on_their_way.steps
        old = [one for one in self._differing[: -self._keep_count] if one not in awaited]
        self._differing = [one for one in self._differing if one not in old]
        if old and self._nodes.is_leader:
            self._fast.remove(old)


class DurableStage:
    def __init__(self, ranks: Ranks, run: RunContext, there: RunSteps) -> None:
        self._ranks, self._durable, self._fast, self._rule = ranks, run.durable, run.fast, run.keep
        self._emit = run.emit
        self._rule_to_check = run.keep  # until something goes
        self._complete = {saved.step for saved in there.complete}
        self._abandoned = {saved.step for saved in there.abandoned}
        self._new: set[int] = set()  # not opened since they were saved
        self.is_going_back = False  # an older step was restored, and nothing was saved since

    def leave_behind(self, steps: Collection[int]) -> None:
        known = self._abandoned | self._complete
        self._abandoned = known.intersection(steps)
        self._complete = known.difference(steps)

    def upload(self, save: StepSave, written: WrittenSave, senders: Mapping[str, int]) -> None:
        """Upload the files of a step as they are, and commit it; all ranks call this."""
        sent_nbytes = self._ranks.together(lambda: self._send(save.step, written, senders))
        self._ranks.on_one(lambda: self._commit(save.step, written))
        save.reached("durable", uploaded_nbytes=sent_nbytes)
        self.note(save)

    def _send(self, step: int, written: WrittenSave, senders: Mapping[str, int]) -> int:
        assert self._fast is not None
        own = [name for name, rank in senders.items() if rank == self._ranks.rank]
        return upload_files(self._fast.open(step), self._durable.open(step), own, written.files) if own else 0

    def _commit(self, step: int, written: WrittenSave) -> None:
        self._durable.check_lease()
        commit_files(self._durable.open(step), written, LastPublished(), overwrite=True)

    def note(self, save: StepSave) -> None:
        self._complete.add(save.step)
        self._abandoned.discard(save.step)
        self._new.add(save.step)

    def prune(self) -> None:
        # while the run goes back, newer steps are part of it, and would push out the one that was restored
        if not self._ranks.is_first or self.is_going_back:
            return
        try:
            self._durable.check_lease()
            if self._rule is None:  # nothing can go, so nothing has to be listed
                self._write_kept()
            else:
                self._list_and_remove(self._rule)
        except CheckpointError as error:
            logger.warning("Old steps could not be removed, and will be at the next save: %s", error)
        except Exception as error:  # of a rule of the user's own
            logger.error("The rule that says what to keep raised %s: %s", type(error).__name__, error)

    def _write_kept(self) -> None:
        kept = {**dict.fromkeys(self._abandoned, ("abandoned",)), **dict.fromkeys(self._complete, ("all",))}
        write_kept(self._durable.open_own(), kept)
        with contextlib.suppress(CheckpointError):  # only lists take longer then
            for step in self._new:
                self._durable.problem_of(step)
        self._new.clear()
        self._durable.write_seen()

    def _list_and_remove(self, rule: Keep | KeepRule) -> None:
        """List the steps, as others may have removed or harmed some, and remove those that a rule does not keep."""
        found = self._durable.list()
        doomed = self._durable.decide(rule, found)
        if doomed.why:
            self._warn_of_missing_metrics(found.complete)
        # before anything is written: the disk may be full
        removed = self._durable.remove({**dict.fromkeys(found.removing, BEGUN), **doomed.why})
        if removed.steps:
            self._emit(StepsRemoved(removed.steps, "durable"))
        self._durable.write_seen()
        try:
            write_kept(self._durable.open_own(), doomed.kept)
        except CheckpointError as error:
            logger.warning("Why steps are kept could not be written down: %s", error)

    def _warn_of_missing_metrics(self, complete: Sequence[SavedStep]) -> None:
        rule, self._rule_to_check = self._rule_to_check, None
        for metric in rule.missing_metrics(complete) if isinstance(rule, Keep) else ():
            logger.warning(
                "No step has the metric %r, by which keep= keeps the best ones: none is kept for it so far. Is that "
                "what metrics= of save calls it?",
                metric,
            )


Job = Callable[[], None]


class Background:
    """Does jobs one after the other, on a thread that is there as long as there are any."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name, self._on_error = name, on_error
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self.waiting = 0

    def do(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self.waiting += 1
            is_idle = self.waiting == 1
        if not is_idle:
            return
        # not a daemon: the interpreter waits for it, so that a save that has begun is finished
        thread = threading.Thread(target=self._work, name=self._name)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts no threads any more
            self._work()

    def wait_for(self, most_waiting: int = 0, within_seconds: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.waiting <= most_waiting, within_seconds)

    def _work(self) -> None:
        while True:
            job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:
                self._on_error(error)
            finally:
                del job  # it may hold a state
            with self._changed:
                self.waiting -= 1
                self._changed.notify_all()
                if not self.waiting:
                    return


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
        with self._changed:
            return frozenset(self._steps)

    def add(self, step: int) -> None:
        self._durable.hold(step)
        with self._changed:
            self._steps.append(step)

    def done(self, step: int) -> None:
        self._durable.let_go(step)
        with self._changed:
            self._steps.remove(step)
            self._changed.notify_all()

    def wait(self, most_waiting: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._steps) <= most_waiting)
