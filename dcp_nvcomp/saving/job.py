"""The save of one rank's data files: encode, stage and write at the same time.

    calling thread   resolves items, makes records, gathers them in tasks, hands out each in order, a buffer reserved
    encode threads   take and fill the buffers, in any order: `thread_count` with the CPU engine, two with CUDA engines
    write threads    one per lane: append the blocks of the lane's files in order, return the buffers

A lane is a list of files that are written one after the other; lanes are written at the same time. This cannot
deadlock: no task waits for a buffer once it is handed out, and the oldest of those handed out is always the next one
that its lane writes.

Two threads encode on a GPU, each with an engine, and therefore a stream, of its own: while one batch is encoded, the
previous one is copied to the host, and the one before that is written.

The first error stops everything: tasks are no longer encoded, blocks are no longer written, streams are aborted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.engines.cuda.engine import EnginePolicy
from dcp_nvcomp.engines.cuda.pool import ENGINES_PER_DEVICE
from dcp_nvcomp.engines.memory import PinnedMemory, pinned_allocate
from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.footer import FileIdentity
from dcp_nvcomp.saving.data_file_writer import DataFileWriter
from dcp_nvcomp.saving.encode.buffers import BufferPool, cuda_buffer_nbytes
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.encode.sources import Source, Workbench, encode_parts
from dcp_nvcomp.saving.encode.tasks import Task, Tasks
from dcp_nvcomp.saving.file_plan import PlannedFile, small_together
from dcp_nvcomp.saving.stats import RankTotals
from dcp_nvcomp.storage.base import Filesystem

__all__ = ["SaveJob", "SaveOptions"]

logger = logging.getLogger(__name__)

HOST_BUFFER_NBYTES = (1 << 20) + (64 << 10)  # a block of 1 MiB and the padding of its slices
BUFFERS_PER_THREAD = 8
CUDA_BUFFERS = 8


@dataclass(frozen=True)
class SaveOptions:
    """A writer's options, as far as a save job needs them.

    Attributes:
        thread_count: encoding threads.
        host_memory_budget: bytes that encoded blocks may take on the host.
        policy: for the CUDA engines.
        may_use_cuda: True if GPU tensors would be encoded on their GPU.
    """

    thread_count: int
    host_memory_budget: int
    policy: EnginePolicy
    may_use_cuda: bool = False


@dataclass(frozen=True)
class _EndOfFile:
    """The last message of a file."""


_Message = PlannedFile | Task | _EndOfFile | None


@dataclass
class _Lane:
    files: Sequence[PlannedFile]
    messages: SimpleQueue[_Message] = field(default_factory=SimpleQueue)
    fed_nbytes: int = 0


class SaveJob:
    """One rank's part of one save.

    Args:
        filesystem: the checkpoint.
        lanes: the files of each lane.
        new_record_maker: returns a record maker for one file.
        resolve: returns the data of an item; called on the calling thread.
        options: see `SaveOptions`.
        identity: for the footers.
        progress: called with the uncompressed size of what was written, from any thread.
        state_nbytes: about how much is saved.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        lanes: Sequence[Sequence[PlannedFile]],
        new_record_maker: Callable[[], RecordMaker],
        resolve: Callable[[WriteItem], Any],
        options: SaveOptions,
        *,
        identity: FileIdentity,
        progress: Callable[[int], None],
        state_nbytes: int,
    ) -> None:
        self._filesystem = filesystem
        self._lanes = [_Lane(files) for files in lanes]
        self._new_record_maker = new_record_maker
        self._resolve = resolve
        self._options = options
        self._identity = identity
        self._progress = progress
        # enough to keep every thread busy, plus read-ahead within the budget to absorb tensors that encode slower than
        # they write
        most = max(
            BUFFERS_PER_THREAD * (options.thread_count + len(lanes)),
            options.host_memory_budget // 16 // HOST_BUFFER_NBYTES,
        )
        # if a GPU may take part, most of the budget is for its larger batches
        host_budget = options.host_memory_budget // (4 if options.may_use_cuda else 1)
        self._host_pool = BufferPool(HOST_BUFFER_NBYTES, host_budget, most)
        cuda_budget = options.host_memory_budget - self._host_pool.limit_nbytes
        pinned = PinnedMemory(pinned_allocate)
        self._cuda_pool = BufferPool(
            cuda_buffer_nbytes(cuda_budget, state_nbytes), cuda_budget, CUDA_BUFFERS, pinned.allocate
        )
        self._host_tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._cuda_tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._cuda_threads = 0
        queues: list[SimpleQueue[Any]] = [*(lane.messages for lane in self._lanes), self._host_tasks, self._cuda_tasks]
        self._workers = WorkerGroup(queues, partial(_close_pools, self._host_pool, self._cuda_pool))
        self._lock = threading.Lock()
        self._opened: list[str] = []
        self._results: list[WriteResult] = []
        self._busy: dict[str, list[float]] = {"encode": [], "write": []}
        self.totals = RankTotals()

    def run(self) -> list[WriteResult]:
        """Write all files.

        Returns:
            One result per item.

        Raises:
            BaseException: the first error of any thread. The files have been removed.
        """
        try:
            self._workers.run(self._start_and_feed)
        except BaseException:
            self._remove_files()
            raise
        self.totals.seconds.update({stage: max(spent, default=0.0) for stage, spent in self._busy.items()})
        return self._results

    def _remove_files(self) -> None:
        try:
            self._filesystem.remove(self._opened)
        except StorageError as error:  # must not hide the error that stopped the save
            logger.warning("Could not remove the files of a failed save: %s", error)

    # --- calling thread ---------------------------------------------------------------------------------------------

    def _start_and_feed(self) -> None:
        for lane in self._lanes:
            self._workers.start("dcp-write", self._write_lane, lane)
        for _ in range(self._options.thread_count):
            self._workers.start("dcp-encode", self._encode, self._host_tasks)
        self._feed()

    def _feed(self) -> None:
        """Hand out all tasks, always to the lane with the fewest bytes so far, so that lanes end together."""
        feeds = [(lane, self._feed_lane(lane)) for lane in self._lanes]
        while feeds:
            lane, tasks = min(feeds, key=lambda feed: feed[0].fed_nbytes)
            task = next(tasks, None)
            if task is None:
                feeds.remove((lane, tasks))
                continue
            if self._workers.error is not None:
                return
            # the writer waits for whatever it is given, so it is given the task when nothing can come between any more
            if not task.parts:
                task.done.release()
            elif task.cuda_device is None:
                self._host_tasks.put(task)
            else:
                if self._cuda_threads < ENGINES_PER_DEVICE:
                    self._cuda_threads += 1
                    self._workers.start("dcp-cuda", self._encode, self._cuda_tasks)
                self._cuda_tasks.put(task)
            lane.messages.put(task)

    def _feed_lane(self, lane: _Lane) -> Iterator[Task]:
        tasks = Tasks(self._pool_for)
        for file in lane.files:
            lane.messages.put(file)
            maker = self._new_record_maker()
            for items in small_together(file.items):
                resolved = [(item, self._resolve(item)) for item in items]
                # a copy from a device may wait for it, and nothing should wait while the collector is paused
                with collector_paused() if _are_on_host(resolved) else nullcontext():
                    ready = [made for item, data in resolved for made in maker.add(item, data)]
                del resolved  # tensors may be freed once they are encoded
                for record, source in ready:
                    lane.fed_nbytes += record.nbytes
                    yield from tasks.add(record, source)
                del ready
            for record, source in maker.flush():
                lane.fed_nbytes += record.nbytes
                yield from tasks.add(record, source)
            yield from tasks.flush()
            lane.messages.put(_EndOfFile())

    def _pool_for(self, source: Source) -> BufferPool:
        return self._host_pool if source.cuda_device is None else self._cuda_pool

    # --- encode threads ---------------------------------------------------------------------------------------------

    def _encode(self, tasks: SimpleQueue[Task | None]) -> None:
        bench: Workbench | None = None
        busy, recoded = 0.0, 0
        while (task := tasks.get()) is not None:
            start = time.perf_counter()
            try:
                if self._workers.error is None:
                    # only now: whatever fails, the tasks have to be taken, because writers wait for them
                    bench = bench or Workbench(self._options.policy)
                    assert task.pool is not None
                    task.buffer = task.pool.take()
                    task.blocks = encode_parts(task.parts, task.buffer, bench)
                    recoded += sum(block.was_wrong for block in task.blocks)
            except BaseException as error:
                self._workers.fail(error)
            task.parts = []
            task.done.release()
            busy += time.perf_counter() - start
        tasks.put(None)  # for the next of the threads that share this queue
        self._busy["encode"].append(busy)
        with self._lock:
            self.totals.recoded_blocks += recoded

    # --- write threads ----------------------------------------------------------------------------------------------

    def _write_lane(self, lane: _Lane) -> None:
        output: DataFileWriter | None = None
        busy = 0.0
        while (message := lane.messages.get()) is not None:
            if isinstance(message, Task):
                message.done.acquire()
            start = time.perf_counter()
            try:
                if self._workers.error is None:
                    output = self._handle(message, output)
            except BaseException as error:
                self._workers.fail(error)
            if isinstance(message, Task) and message.pool is not None:
                message.pool.give_back(message.buffer)
            busy += time.perf_counter() - start
        if output is not None:
            output.stream.abort()
        self._busy["write"].append(busy)

    def _handle(self, message: PlannedFile | Task | _EndOfFile, output: DataFileWriter | None) -> DataFileWriter | None:
        if isinstance(message, PlannedFile):
            stream = self._filesystem.open_output(message.name)
            opened = DataFileWriter(stream, message.name, self._identity, self._progress)
            self._opened.append(message.name)  # only now: a file that could not be created is not ours
            return opened
        assert output is not None
        if isinstance(message, Task):
            position = 0
            for record, count, begins in message.records:
                if begins:
                    output.begin(record)
                output.append(message.blocks[position : position + count])
                position += count
        else:
            file = output.finish()
            with self._lock:
                self.totals.files[file.name] = file.nbytes
                for codec, dtype, totals in output.totals:
                    self.totals.add(codec, dtype, totals)
                self._results.extend(output.results(file))
            return None
        return output


def _are_on_host(resolved: Sequence[tuple[WriteItem, Any]]) -> bool:
    return all(not isinstance(data, torch.Tensor) or data.device.type == "cpu" for _, data in resolved)


def _close_pools(*pools: BufferPool) -> None:
    for pool in pools:
        pool.close()
