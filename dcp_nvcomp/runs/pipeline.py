"""What happens to a save behind training, on two threads of each rank.

    fast thread       wait until all ranks have written -> `.metadata` on each node -> copies to peers -> old steps go
                                                                      or compare replicas
    durable thread    upload the files as they are -> commit -> steps that nothing keeps go

A save that goes straight to the durable tier has its place on the durable thread, so steps are published in order. Both
threads do the same jobs in the same order on all ranks, each with process groups of its own, and each stage ends with
the ranks telling each other whether it worked: an error is the same on all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.runs.abandoned import Abandoned
from dcp_nvcomp.runs.background import Background
from dcp_nvcomp.runs.events import Event, ReplicasDiffer, StepsRemoved
from dcp_nvcomp.runs.keep import Keep, KeepRule, SavedStep
from dcp_nvcomp.runs.kept import write_kept
from dcp_nvcomp.runs.publishers import NodePublisher
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.removal import REMOVING
from dcp_nvcomp.runs.replicas.comparing import compared
from dcp_nvcomp.runs.replicas.written import WrittenPart, written_by
from dcp_nvcomp.runs.step_save import StepSave
from dcp_nvcomp.runs.steps import RunSteps
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.nodes import Nodes
from dcp_nvcomp.runs.tiers.transfer import move_files
from dcp_nvcomp.runs.tiers.uploads import upload_files
from dcp_nvcomp.saving.asynchronous.async_save import AsyncSave
from dcp_nvcomp.saving.commit import WrittenSave, commit_files
from dcp_nvcomp.saving.published import LastPublished
from dcp_nvcomp.saving.stats import SaveStats

__all__ = ["Pipeline", "TierRules"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierRules:
    """What is kept where.

    Attributes:
        keep: rule for the durable tier.
        fast_keep: how many complete steps stay in the fast tier.
        copies: how many nodes get copies of each node's files.
    """

    keep: Keep | KeepRule | None
    fast_keep: int
    copies: int


class Pipeline:
    """The threads of a manager.

    Args:
        fast_ranks, durable_ranks: the ranks, for either thread.
        nodes: where they are.
        fast: this node's fast tier, if there is one.
        durable: the durable tier.
        rules: what is kept where.
        there: the steps of the durable tier; only the first rank's count.
        check_lease: raises if another manager has taken the run over; asked before the durable tier is changed.
        tell: called with each event.
        on_failure: called with the number of a save that failed, and its error.
    """

    def __init__(
        self,
        fast_ranks: Ranks,
        durable_ranks: Ranks,
        nodes: Nodes,
        fast: FastTier | None,
        durable: DurableTier,
        rules: TierRules,
        there: RunSteps,
        *,
        check_lease: Callable[[], None],
        tell: Callable[[Event], None],
        on_failure: Callable[[int, BaseException], None],
    ) -> None:
        self._fast_ranks, self._durable_ranks, self._nodes = fast_ranks, durable_ranks, nodes
        self._fast, self._durable, self._rules = fast, durable, rules
        self._transfers = nodes.copies(rules.copies)  # to peers, after each save
        self._check_lease, self._tell, self._on_failure = check_lease, tell, on_failure
        self._complete = {saved.step: saved for saved in there.complete}
        self._abandoned = {saved.step: saved for saved in there.abandoned}
        self._leftover: set[int] = set()
        self._changed = threading.Condition()
        self._on_their_way: list[int] = []
        self._in_fast: list[int] = []
        self._differing: list[int] = []  # whose replicas differ, since the last one that was copied
        self._has_said_so = False
        self.fast_nbytes = 0  # what the last step took on this node
        self._durable_thread = Background("dcp-run-durable", _unexpected)
        self._fast_thread = None if fast is None else Background("dcp-run-fast", _unexpected)

    @property
    def on_their_way(self) -> int:
        """How many steps are not in the durable tier yet that are on their way there."""
        with self._changed:
            return len(self._on_their_way)

    def wait_for_uploads(self, most_waiting: int) -> None:
        """Wait until no more than this many steps are on their way to the durable tier."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._on_their_way) <= most_waiting)

    def _sets_out(self, step: int) -> None:
        self._durable.hold(step)
        with self._changed:
            self._on_their_way.append(step)

    def _arrives(self, step: int) -> None:
        self._durable.let_go(step)
        with self._changed:
            self._on_their_way.remove(step)
            self._changed.notify_all()

    def follow_direct(self, save: StepSave, saving: AsyncSave) -> None:
        """See a save to its end that goes straight to the durable tier."""
        self._sets_out(save.step)
        self._durable_thread.do(lambda: self._end_direct(save, saving))

    def follow_fast(
        self,
        save: StepSave,
        saving: AsyncSave,
        publisher: NodePublisher,
        *,
        upload: bool,
        replicas: Sequence[Sequence[int]] = (),
    ) -> None:
        """See a save to its end that goes to the fast tier.

        Args:
            save: the save.
            saving: its asynchronous save, of this rank's replica if there are some.
            publisher: that of its writer.
            upload: whether it goes on to the durable tier.
            replicas: the ranks of each; empty if all ranks save together.
        """
        assert self._fast_thread is not None
        if upload:
            save.in_parts(2)
            self._sets_out(save.step)
        self._fast_thread.do(lambda: self._end_fast(save, saving, publisher, replicas, upload=upload))

    def upload(self, save: StepSave, written: WrittenSave, senders: Mapping[str, int]) -> None:
        """Upload a step that is in the fast tier.

        Args:
            save: the save.
            written: what to publish.
            senders: the rank that sends each file.
        """
        self._sets_out(save.step)
        self._durable_thread.do(lambda: self._end_upload(save, written, senders))

    def go_back(self, abandoned: Abandoned) -> None:
        """Leave saves behind; nothing is on its way.

        Args:
            abandoned: the saves; all others that are there are the run's.
        """
        known = {**self._abandoned, **self._complete}
        left = abandoned.saves.keys()
        self._abandoned = {step: known[step] for step in known.keys() & left if step not in abandoned.damaged}
        self._complete = {step: saved for step, saved in known.items() if step not in left}
        self._in_fast = [step for step in self._in_fast if step not in left]
        if self._fast is not None and self._nodes.is_leader:
            try:
                self._fast.remove([step for step in self._fast.steps() if step in left])
            except CheckpointError as error:
                logger.warning("The fast tier can't be listed: %s", error)

    def remember_fast(self, steps: Collection[int]) -> None:
        """Say which complete steps the fast tier has."""
        self._in_fast = sorted({*self._in_fast, *steps})

    def wait(self) -> None:
        """Wait until all of it is done."""
        if self._fast_thread is not None:
            self._fast_thread.wait_for()
        self._durable_thread.wait_for()

    def _end_direct(self, save: StepSave, saving: AsyncSave) -> None:
        error: BaseException | None = None
        try:
            save.reached("durable", stats=_stats(saving.upload_completion.result()))
            self._note_durable(save)
        except BaseException as raised:
            error = raised
        self._arrives(save.step)
        self._end_part(save, error)
        self._prune()

    def _end_fast(
        self,
        save: StepSave,
        saving: AsyncSave,
        publisher: NodePublisher,
        replicas: Sequence[Sequence[int]],
        *,
        upload: bool,
    ) -> None:
        try:
            # the save of another replica may have failed, or this one's, of which the other does not know
            stats = self._fast_ranks.together(lambda: _stats(saving.upload_completion.result()))
            parts = written_by(self._fast_ranks, replicas, publisher.written, save.elapsed_seconds)
            own = next(one for one in parts if self._fast_ranks.rank in one.ranks)
            self._publish_on_nodes(save.step, own)
            save.reached("fast", stats=stats)
        except BaseException as error:
            if upload:
                self._arrives(save.step)
                save.in_parts(1)
            self._end_part(save, error)
            return
        if upload:
            first = min(parts, key=lambda one: one.seconds)  # the ranks with the least to do besides
            self._durable_thread.do(lambda: self._end_upload(save, first.written, first.senders()))
        self.fast_nbytes = self._nbytes_here(own)
        failed: BaseException | None = None
        try:
            if len(parts) > 1:
                is_copied = self._compare(save, parts, own)
            else:
                is_copied, copied_nbytes = True, self._copy(save.step, own)
                if self._transfers:
                    save.reached("copies", copied_nbytes=copied_nbytes)
        except BaseException as error:
            failed = error
        else:
            (self._prune_fast if is_copied else self._prune_differing)(save.step)
        self._end_part(save, failed)

    def _publish_on_nodes(self, step: int, part: WrittenPart) -> None:
        """Put the step's `.metadata` on the nodes other than the coordinator's."""
        assert self._fast is not None
        fast = self._fast

        def publish() -> None:
            if self._nodes.is_leader and self._nodes.own != self._nodes.node_of(part.ranks[0]):
                filesystem = fast.open(step)
                filesystem.remove([REMOVING])
                filesystem.publish(METADATA_NAME, part.written.data)

        self._fast_ranks.together(publish)

    def _compare(self, save: StepSave, parts: Sequence[WrittenPart], own: WrittenPart) -> bool:
        """Find out whether the replicas have saved the same; return False if they have not.

        Where they have divided the state differently that is not known. Each is a copy all the same, but a restore then
        reads one of them on all nodes.
        """
        assert self._fast is not None
        fast, rank = self._fast, self._fast_ranks.rank
        replicas = [one.ranks for one in parts]
        found = compared(self._fast_ranks, replicas, fast.open(save.step), own.files_of(rank))
        if found.differing:
            self._tell(ReplicasDiffer(save.step, found.differing))
            return False
        if found.is_complete:

            def mark() -> None:
                if self._nodes.is_leader:
                    fast.mark_equal(save.step, own.written.save_id)

            self._fast_ranks.together(mark)
        elif not self._has_said_so and self._fast_ranks.is_first:
            self._has_said_so = True
            logger.warning("The replicas divide the state differently, so that their checksums can't be compared.")
        save.reached("copies")
        return True

    def _copy(self, step: int, part: WrittenPart) -> int:
        """Send this rank's files to its peers; return what it received."""
        if not self._transfers:
            return 0
        assert self._fast is not None
        transfers = {one: part.files_of(one.source) for one in self._transfers}
        received: list[int] = []
        here = self._fast.open(step)
        move_files(
            self._fast_ranks,
            transfers,
            here,
            here,
            on_moved=lambda name, nbytes: received.append(part.written.files[name]),
        )
        return sum(received)

    def _nbytes_here(self, part: WrittenPart) -> int:
        """Return how much of a save is on this node: what its ranks wrote, and the copies that they receive."""
        own = self._nodes.ranks_of(self._nodes.own)
        sources = [*own, *(one.source for one in self._transfers if one.to in own)]
        return sum(sum(part.files_of(rank).values()) for rank in sources)

    def _prune_fast(self, step: int) -> None:
        """Remove what is older than the steps that stay: complete ones, and what jobs that died have left of others.

        Called once the copies of a step are made: without them it does not stand in for older ones.
        """
        assert self._fast is not None
        self.remember_fast([step])
        self._differing = []
        self._in_fast = self._in_fast[-self._rules.fast_keep :]
        if len(self._in_fast) < self._rules.fast_keep or not self._nodes.is_leader:
            return
        with self._changed:
            busy = set(self._on_their_way)
        gone = self._fast.remove_before(self._in_fast[0], but=busy)
        if gone:
            self._tell(StepsRemoved(gone, "fast"))

    def _prune_differing(self, step: int) -> None:
        """Remove older steps whose replicas differ, so that these do not fill the memory; equal ones stay."""
        assert self._fast is not None
        self._differing.append(step)
        with self._changed:
            awaited = set(self._on_their_way)
        old = [one for one in self._differing[: -self._rules.fast_keep] if one not in awaited]
        self._differing = [one for one in self._differing if one not in old]
        if old and self._nodes.is_leader:
            self._fast.remove(old)

    def _end_upload(self, save: StepSave, written: WrittenSave, senders: Mapping[str, int]) -> None:
        error: BaseException | None = None
        try:
            sent = self._durable_ranks.together(lambda: self._send(save.step, written, senders))
            self._durable_ranks.on_one(lambda: self._commit(save.step, written))
            save.reached("durable", uploaded_nbytes=sent)
            self._note_durable(save)
        except BaseException as raised:
            error = raised
        self._arrives(save.step)
        self._end_part(save, error)
        self._prune()

    def _send(self, step: int, written: WrittenSave, senders: Mapping[str, int]) -> int:
        assert self._fast is not None
        own = [name for name, rank in senders.items() if rank == self._durable_ranks.rank]
        return upload_files(self._fast.open(step), self._durable.open(step), own, written.files) if own else 0

    def _commit(self, step: int, written: WrittenSave) -> None:
        self._check_lease()
        filesystem = self._durable.open(step)
        filesystem.remove([REMOVING])
        commit_files(filesystem, written, LastPublished(), overwrite=True)

    def _note_durable(self, save: StepSave) -> None:
        self._complete[save.step] = SavedStep(save.step, time.time(), save.metrics)
        self._abandoned.pop(save.step, None)
        self._leftover.discard(save.step)

    def _prune(self) -> None:
        """Remove what nothing keeps of the durable tier, on the first rank."""
        if not self._durable_ranks.is_first:
            return
        try:
            self._check_lease()
            doomed = self._durable.doomed(self._rules.keep, self._complete.values(), self._abandoned.values())
            write_kept(self._durable.open_own(), doomed.kept)
            removed = self._durable.remove({*doomed.steps, *self._leftover})
        except CheckpointError as error:
            logger.warning("Old steps could not be removed, and will be at the next save: %s", error)
            return
        except Exception as error:  # of a rule of the user's own
            logger.error("The rule that says what to keep raised %s: %s", type(error).__name__, error)
            return
        self._leftover = set(removed.failed)
        for step in (*removed.steps, *removed.failed):
            self._complete.pop(step, None)
            self._abandoned.pop(step, None)
        if removed.steps:
            self._tell(StepsRemoved(removed.steps, "durable"))

    def _end_part(self, save: StepSave, error: BaseException | None) -> None:
        """Note that a part of a save has ended, and tell of the save if it was the last."""
        if error is not None:
            self._tell(save.failed(error))
            self._on_failure(save.number, error)
        if not save.part_ended(error):
            return
        if save.error is not None:
            save.saved.set_exception(save.error)
        else:
            event = save.finished()
            self._tell(event)
            save.saved.set_result(event)


def _stats(metadata: Metadata) -> SaveStats | None:
    return SaveStats.of(metadata)


def _unexpected(error: BaseException) -> None:
    logger.error("A checkpoint manager's thread failed: %s: %s", type(error).__name__, error)
