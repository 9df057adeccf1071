"""A rank's part of an asynchronous save whose state is copied first, to be encoded and written in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.saving.asynchronous.background import BackgroundCannotRun, BackgroundProcess, Copy
from dcp_nvcomp.saving.asynchronous.segments import StagingBudget
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegments, can_copy, copied, resolver, room_nbytes
from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.rank_save import RankSave, Resolve, Written

logger = logging.getLogger(__name__)

Copying: TypeAlias = Literal["copied", "refused", "later"]


class CopiedWrite:
    """Copies what one rank saves, and has the copy written."""

    def __init__(
        self, segments: SharedSegments, budget: StagingBudget, process: Callable[[], BackgroundProcess]
    ) -> None:
        self.staged_nbytes = 0
        self._segments = segments
        self._budget = budget
        self._start = process
        self._process: BackgroundProcess | None = None
        self._lock = threading.Lock()
        self._copy: Copy | None = None
        self._held_nbytes = 0
        self._hurry: Callable[[], None] | None = None
        self._must_hurry = False

    def copy(
        self, items: Sequence[WriteItem], resolve: Resolve, budget_nbytes: int, *, may_wait: bool = True
    ) -> Copying:
        """Copy the data of all items, once the budget allows it."""
        first = next((item for item in items if item.tensor_data is not None), None)
        if first is not None and not can_copy(resolve(first)):
            return "refused"
        try:
            self._process = self._start()
        except Exception as error:
            logger.warning("The state is encoded while training waits: no background process can start (%s).", error)
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
            self._copy = Copy([], segment)
            values = (objects[id(item)] if id(item) in objects else resolve(item) for item in items)
            places = copied(values, segment, nbytes)
        except OSError as error:
            logger.warning("The state is encoded while training waits: no memory for a copy of it (%s).", error)
            return "refused"
        if places is None:
            return "refused"
        self._copy = Copy(places, segment)
        self.staged_nbytes = nbytes
        return "copied"

    def run(
        self,
        part: RankSave,
        *,
        within_seconds: float | None,
        remembered: RememberedChoices,
        progress: Callable[[int], None],
    ) -> Written:
        assert self._copy is not None
        try:
            return self._usable_process().write(
                part, self._copy, within_seconds=within_seconds, begun=self._begun, encoded=self.end, progress=progress
            )
        except BackgroundCannotRun as error:
            # the state has changed since, but the copy is here too
            logger.warning("The background process can't make this save, so training's process does: %s", error)
        except BaseException:
            _remove_files(part)
            raise
        return part.run(
            resolver(part.items, self._copy.places, self._copy.segment.view),
            engine=EngineChoice("cpu"),
            remembered=remembered,
            progress=progress,
            on_staged=self.end,
        )

    def _usable_process(self) -> BackgroundProcess:
        """Return the process, or another one if it has died or was ended by `close` since the copy was made."""
        assert self._process is not None
        if not self._process.is_usable:
            try:
                self._process = self._start()
            except OSError as error:
                raise BackgroundCannotRun(str(error)) from error
        return self._process

    def _begun(self, hurry: Callable[[], None]) -> None:
        with self._lock:
            self._hurry, must_hurry = hurry, self._must_hurry
        if must_hurry:
            hurry()

    def hurry(self) -> None:
        with self._lock:
            self._must_hurry, hurry = True, self._hurry
        if hurry is not None:
            hurry()

    def end(self) -> None:
        with self._lock:
            done, self._copy = self._copy, None
            held, self._held_nbytes = self._held_nbytes, 0
        if done is not None:
            if self.staged_nbytes > done.segment.there_nbytes:
                done.segment.map(self.staged_nbytes)
            self._segments.give_back(done.segment)
        if held:
            self._budget.give_back(held)


def _remove_files(part: RankSave) -> None:
    """Remove what a process that died may have left half written; the names are of this save only."""
    try:
        with part.open() as filesystem:
            filesystem.remove([file.name for lane in part.lanes(filesystem) for file in lane])
    except CheckpointError as error:  # what failed first is what is raised
        logger.warning("Files of a failed save could not be removed: %s", error)
