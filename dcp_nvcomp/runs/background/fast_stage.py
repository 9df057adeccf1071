"""What happens to a step in the fast tier, once all ranks have written it. All ranks call this at the same steps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.runs.background.threads import OnTheirWay
from dcp_nvcomp.runs.events import ReplicasDiffer, StepsRemoved
from dcp_nvcomp.runs.options import RunContext
from dcp_nvcomp.runs.own_files import REMOVING
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.replicas.comparing import WrittenPart, compared
from dcp_nvcomp.runs.step_save import StepSave
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.transfer import move_files

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
        """Remove steps that the run has left behind."""
        self._complete = [step for step in self._complete if step not in steps]
        if not self._nodes.is_leader:
            return
        try:
            self._fast.remove([step for step in self._fast.steps() if step in steps])
        except CheckpointError as error:
            logger.warning("The fast tier can't be listed: %s", error)

    def publish(self, step: int, part: WrittenPart) -> None:
        """Put the step's `.metadata` on the nodes other than the coordinator's."""

        def publish_here() -> None:
            if self._nodes.is_leader and self._nodes.own != self._nodes.node_of(part.ranks[0]):
                filesystem = self._fast.open(step)
                filesystem.remove([REMOVING])
                filesystem.publish(METADATA_NAME, part.written.data)

        self._ranks.together(publish_here)

    def secure(self, save: StepSave, parts: Sequence[WrittenPart], own: WrittenPart) -> None:
        """See to it that a step outlives a node; then let older ones go."""
        self.step_nbytes = self._nbytes_here(own)
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

    def _nbytes_here(self, part: WrittenPart) -> int:
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
