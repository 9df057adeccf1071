"""One asynchronous save, between the thread that waits for it and the thread that makes it.

The caller's thread also pickles the objects of the state: a pickle imports, and the caller may hold a module's lock.
State in host memory is copied first (`CopiedWrite`), and so is what is on GPUs if they have the room (`DeviceCopies`),
to be encoded and written in the background.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.saving.asynchronous.background import BackgroundCannotRun, BackgroundProcess, Copy
from dcp_nvcomp.saving.asynchronous.device_copies import DeviceCopies
from dcp_nvcomp.saving.asynchronous.segments import SegmentStores, StagingBudget, StagingMemory, default_budget_nbytes
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegments, can_copy, copied, resolver, room_nbytes
from dcp_nvcomp.saving.asynchronous.upload_future import UploadFuture
from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.rank_save import RankSave, Resolve, Written
from dcp_nvcomp.saving.stats import RankTotals

# Else this thread keeps the interpreter for another millisecond, until DCP first waits for something, and the caller,
# who may go on, waits for it.
_HANDOVER_SECONDS = 1e-4


class Staging:
    """How one save is staged."""

    def __init__(
        self,
        stores: SegmentStores,
        release: Callable[[], None],
        before: UploadFuture | None,
        copied: CopiedWrite | None = None,
        on_devices: DeviceCopies | None = None,
        *,
        is_waited_for: bool = False,
    ) -> None:
        self.within_seconds: float | None = None
        self.place = ""  # where the save goes, wherever the process moves to meanwhile
        self._copied = copied
        self._on_devices = on_devices
        self._is_copied = False
        self._copying_failed: BaseException | None = None
        self.completion: Future[None] = Future()  # done when the state may change
        self.completion.set_running_or_notify_cancel()  # from now on it can't be cancelled
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self.may_change = not is_waited_for  # the state, before it is staged
        self._is_waited_for = is_waited_for
        asked = self._asked
        self.completion.add_done_callback(lambda _: asked.put(None))
        self._before = before
        self._stores = stores
        self._release = release
        self._lock = threading.Lock()
        self._memory: StagingMemory | None = None
        self._interrupt: BaseException | None = None
        self._began_seconds = time.perf_counter()
        self._stalled_until_seconds: float | None = None

    def write(
        self,
        part: RankSave,
        resolve: Resolve,
        *,
        engine: EngineChoice,
        remembered: RememberedChoices,
        progress: Callable[[int], None],
    ) -> Written:
        """Copy the state and have the copy written, if that is how this save is staged; else encode it, and write."""
        budget_nbytes = part.options.staging_budget_nbytes
        try:
            if self._copying_failed is not None:
                raise self._copying_failed
            if not self._is_copied:
                self._copy(part.items, resolve, budget_nbytes, may_wait=True)
            if self._copied is not None:
                return self._copied.run(
                    part, within_seconds=self.within_seconds, remembered=remembered, progress=progress
                )
            if self._is_copied and self._on_devices is not None:
                resolve = self._on_devices.resolver(part.items)
                return part.run(resolve, engine=engine, remembered=remembered, progress=progress)
            self._memory = StagingMemory(
                self._stores,
                self._budget_nbytes(budget_nbytes, part.nbytes),
                state_nbytes=part.nbytes,
                may_use_cuda=engine.may_use_cuda(),
            )
            return part.run(
                resolve,
                engine=engine,
                remembered=remembered,
                memory=self._memory,
                progress=progress,
                on_staged=self.staged,
            )
        except BaseException as error:
            self.failed(error)  # now, and not when the other ranks have written their files
            raise
        finally:
            self._end_copies()
            if self._memory is not None:
                self._memory.end()

    def _budget_nbytes(self, given_nbytes: int | None, state_nbytes: int) -> int:
        in_use_nbytes = self._stores.budget.in_use_nbytes
        return default_budget_nbytes(state_nbytes, in_use_nbytes) if given_nbytes is None else given_nbytes

    def copy_early(self, items: Sequence[WriteItem], resolve: Resolve, budget_nbytes: int | None) -> None:
        """Copy the state before DCP's part of the save; `write` raises errors, as other ranks wait in collectives."""
        try:
            # memory that is held while others are waited for must not be waited for: two saves could have half each
            self._copy(items, resolve, budget_nbytes, may_wait=False)
        except BaseException as error:
            self._copying_failed = error
            self.failed(error)
        time.sleep(_HANDOVER_SECONDS)

    def _copy(self, items: Sequence[WriteItem], resolve: Resolve, budget_nbytes: int | None, *, may_wait: bool) -> None:
        if self._copied is not None:
            budget_nbytes = self._budget_nbytes(budget_nbytes, sum(map(planned_nbytes, items)))
            outcome = self._copied.copy(items, resolve, budget_nbytes, may_wait=may_wait)
            if outcome == "refused":
                self._copied.end()
                self._copied = None
            self._is_copied = outcome == "copied"
        if self._copied is None and self._on_devices is not None:
            self._is_copied = self._on_devices.copy(items, resolve)
        if self._is_copied:
            self.staged()

    def hurry(self) -> None:
        if self._copied is not None:
            self._copied.hurry()

    def wait(self) -> BaseException | None:
        """Wait until `completion` is done, and return its error. If the wait is interrupted, the save fails.

        The caller may change the state after an interrupt, so what was read by then and after must not be published.
        """
        try:
            while (asked := self._asked.get()) is not None:
                asked.run()
            return self.completion.exception()
        except BaseException as error:
            self._interrupt = error
            raise
        finally:
            self._end_wait()

    def interrupted(self, error: BaseException) -> None:
        """Note that the caller was interrupted and no longer waits: the save fails unless the state is staged."""
        self._interrupt = error
        self._end_wait()

    def _end_wait(self) -> None:
        """Let the save's thread do itself what it asked of the caller, or would."""
        with self._lock:
            self._is_waited_for = False
        while not self._asked.empty():
            if (asked := self._asked.get()) is not None:
                asked.done.cancel()

    def on_caller(self, do: Callable[[], Any]) -> Any:
        """Run a function on the thread that waits for this save; here, if none does (any more)."""
        asked = _Asked(do)
        with self._lock:
            if self._is_waited_for:
                self._asked.put(asked)
            else:
                asked.done.cancel()
        try:
            return asked.done.result()
        except CancelledError:
            return do()

    def staged(self) -> None:
        if self._interrupt is not None and not self.completion.done():
            raise self._interrupt
        self._complete(None)
        if self._memory is not None:
            self._memory.begin_to_write()

    def failed(self, error: BaseException) -> None:
        """Note that the save failed; without effect on `completion` if the state was staged before."""
        self._complete(error)
        self._end_copies()

    def _end_copies(self) -> None:
        for copies in (self._copied, self._on_devices):
            if copies is not None:
                copies.end()

    def _complete(self, error: BaseException | None) -> None:
        with self._lock:
            if self.completion.done():
                return
            self._release()
            if error is None:
                self.completion.set_result(None)
            else:
                self.completion.set_exception(error)

    def wait_for_turn(self) -> None:
        """Wait until the save before is over: checkpoints are published in order."""
        if self._before is not None:
            self._before.wait()

    def returned(self) -> None:
        self._stalled_until_seconds = time.perf_counter()

    def measure(self, totals: RankTotals) -> None:
        totals.stall_seconds = (self._stalled_until_seconds or time.perf_counter()) - self._began_seconds
        staged = self._copied if self._copied is not None else self._memory
        if staged is not None:
            totals.staged_nbytes = staged.staged_nbytes
        elif self._on_devices is not None:
            totals.staged_nbytes = self._on_devices.nbytes


class _Asked:
    def __init__(self, do: Callable[[], Any]) -> None:
        self._do = do
        self.done: Future[Any] = Future()

    def run(self) -> None:
        try:
            self.done.set_result(self._do())
        except BaseException as error:
            self.done.set_exception(error)
            if not isinstance(error, Exception):  # it interrupts the wait
                raise


logger = logging.getLogger(__name__)

Copying: TypeAlias = Literal["copied", "refused", "later"]


class CopiedWrite:
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
            except (OSError, RuntimeError) as error:  # no more threads, say
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
