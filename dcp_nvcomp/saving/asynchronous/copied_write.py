"""A rank's part of an asynchronous save whose state is copied first, to be encoded and written behind.

save's thread       places of all items -> a segment -> copy -> staged
background process  encode -> write                                     (or threads of this process)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.saving.asynchronous.background.process import BackgroundCannotRun, BackgroundProcess, CopiedItems
from dcp_nvcomp.saving.asynchronous.copies import can_copy, copied, resolver, room_nbytes
from dcp_nvcomp.saving.asynchronous.segment_stores import StagingBudget
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegments
from dcp_nvcomp.saving.encode.buffers import BufferMemory
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.file_plan import PlannedFile, planned_nbytes
from dcp_nvcomp.saving.rank_write import RankWrite
from dcp_nvcomp.saving.results import WrittenFile
from dcp_nvcomp.saving.stats import RankTotals
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)

Copying: TypeAlias = Literal["copied", "refused", "later"]


class CopiedWrite:
    """Copies what one rank saves, and has the copy written.

    Attributes:
        staged_nbytes: size of the copy.
    """

    def __init__(
        self, segments: SharedSegments, budget: StagingBudget, process: Callable[[], BackgroundProcess] | None
    ) -> None:
        self.staged_nbytes = 0
        self._segments = segments
        self._budget = budget
        self._process = process
        self._lock = threading.Lock()
        self._copied: CopiedItems | None = None
        self._held_nbytes = 0
        self._hurry: Callable[[], None] | None = None
        self._must_hurry = False

    def copy(
        self,
        items: Sequence[WriteItem],
        resolve: Callable[[WriteItem], Any],
        budget_nbytes: int,
        *,
        may_wait: bool = True,
    ) -> Copying:
        """Copy the data of all items, once the budget allows it."""
        first = next((item for item in items if item.tensor_data is not None), None)
        if first is not None and not can_copy(resolve(first)):
            return "refused"
        # Python objects take memory as soon as they are resolved, and only then have a size. A planner may also make
        # tensors when it is asked for them, so of those there is one at a time.
        objects = {id(item): resolve(item) for item in items if item.tensor_data is None}
        nbytes = room_nbytes([*map(planned_nbytes, items), *(one.getbuffer().nbytes for one in objects.values())])
        if nbytes > budget_nbytes:
            logger.warning("The state is encoded while training waits: it does not fit into staging_budget_nbytes.")
            return "refused"
        if not self._budget.reserve(nbytes, budget_nbytes, lambda: not may_wait):
            return "later"
        self._held_nbytes = nbytes
        try:
            segment = self._segments.take(nbytes)
            self._copied = CopiedItems(items, [], segment)
            values = (objects[id(item)] if id(item) in objects else resolve(item) for item in items)
            places = copied(values, segment, nbytes)
        except OSError as error:
            logger.warning("The state is encoded while training waits: no memory for a copy of it (%s).", error)
            return "refused"
        if places is None:
            return "refused"
        self._copied = CopiedItems(items, places, segment)
        self.staged_nbytes = nbytes
        return "copied"

    def run(
        self,
        write: RankWrite,
        filesystem: Filesystem,
        lanes: Sequence[Sequence[PlannedFile]],
        *,
        within_seconds: float | None,
        remembered: RememberedChoices,
        progress: Callable[[int], None],
    ) -> tuple[list[WrittenFile], RankTotals]:
        """Have what was copied written."""
        assert self._copied is not None
        process = self._started()
        if process is not None:
            try:
                return process.write(
                    write,
                    lanes,
                    self._copied,
                    within_seconds=within_seconds,
                    begun=self._begun,
                    encoded=self.end,
                    progress=progress,
                )
            except BackgroundCannotRun as error:
                logger.warning("The background process can't make this save, so threads do: %s", error)
            except BaseException:
                # it may have died with files half written; their names are of this save only
                _remove(filesystem, [file.name for lane in lanes for file in lane])
                raise
        job = write.job(
            filesystem,
            lanes,
            resolver(self._copied.items, self._copied.places, self._copied.segment.view),
            BufferMemory(
                write.host_memory_budget,
                threads=write.thread_count + len(lanes),
                state_nbytes=self.staged_nbytes,
                may_use_cuda=False,
            ),
            engine=EngineChoice("cpu"),
            remembered=remembered,
            progress=progress,
            on_staged=self.end,
        )
        return job.run(), job.totals

    def _started(self) -> BackgroundProcess | None:
        if self._process is None:
            return None
        try:
            return self._process()
        except Exception as error:
            logger.warning("No background process can be started, so threads make this save: %s", error)
            return None

    def _begun(self, hurry: Callable[[], None]) -> None:
        with self._lock:
            self._hurry, must_hurry = hurry, self._must_hurry
        if must_hurry:
            hurry()

    def hurry(self) -> None:
        """Give way to training no longer."""
        with self._lock:
            self._must_hurry, hurry = True, self._hurry
        if hurry is not None:
            hurry()

    def end(self) -> None:
        """Give back the memory."""
        with self._lock:
            done, self._copied = self._copied, None
            held, self._held_nbytes = self._held_nbytes, 0
        if done is not None:
            if self.staged_nbytes > done.segment.there_nbytes:
                done.segment.map(self.staged_nbytes)
            self._segments.give_back(done.segment)
        if held:
            self._budget.give_back(held)


def _remove(filesystem: Filesystem, names: Sequence[str]) -> None:
    try:
        filesystem.remove(names)
    except CheckpointError as error:  # what failed first is what to tell of
        logger.warning("Files of a failed save could not be removed: %s", error)
