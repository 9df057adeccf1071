"""The save of one rank's data files: encode, stage, write, all at once.

    calling thread   resolves items, makes records, takes a buffer per task, hands out tasks in order
    encode threads   fill the buffers, in any order
    write threads    one per lane: append the blocks of the lane's files in order, give the buffers back

A lane is a list of files written one after the other; lanes are written at the same time. Buffers are taken in the
order in which tasks are handed out, and a lane's tasks in the order of its files. So the oldest task that holds a
buffer is always one that its lane is waiting for, and nothing can wait for a buffer for ever.

The first error stops everything: tasks are no longer encoded, blocks no longer written, streams are aborted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.blocks import Box
from dcp_nvcomp.codecs.ans import Ans
from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.engines.base import EncodedBlock
from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.file_plan import PlannedFile
from dcp_nvcomp.filesystem import Filesystem
from dcp_nvcomp.open_file import OpenFile
from dcp_nvcomp.records import PendingRecord, RecordMaker
from dcp_nvcomp.sources import Source, Workbench
from dcp_nvcomp.staging import BufferPool, Cancelled, pinned_allocate
from dcp_nvcomp.stats import RankTotals
from dcp_nvcomp.threads import join_all

__all__ = ["SaveJob", "SaveOptions"]

logger = logging.getLogger(__name__)

HOST_BUFFER_NBYTES = (1 << 20) + (64 << 10)  # a block of 1 MiB with the padding of its slices
CUDA_BUFFER_NBYTES = 32 << 20
BUFFERS_PER_THREAD = 8


@dataclass(frozen=True)
class SaveOptions:
    """What a save needs to know beside what it saves.

    Attributes:
        thread_count: encoding threads.
        host_memory_budget: bytes that encoded blocks may take on the host.
        device_memory_budget: bytes that CUDA engines may take on a device.
        identity: what the footers say of the save: save_id, rank, writer.
        progress: called with the uncompressed size of what was written, from any thread.
    """

    thread_count: int
    host_memory_budget: int
    device_memory_budget: int
    identity: dict[str, Any]
    progress: Callable[[int], None]


class _Task:
    """Some blocks of one record: to be encoded by any thread, then written by one. `done` is held until encoded."""

    __slots__ = ("blocks", "boxes", "buffer", "chain", "done", "error", "pool", "source")

    def __init__(
        self, source: Source, boxes: Sequence[Box], chain: CodecChain, pool: BufferPool, buffer: memoryview
    ) -> None:
        self.source: Source | None = source
        self.boxes = boxes
        self.chain = chain
        self.pool = pool
        self.buffer = buffer
        self.blocks: list[EncodedBlock] = []
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


@dataclass(frozen=True)
class _EndOfFile:
    """The last message of a file."""


_Message = PlannedFile | PendingRecord | _Task | _EndOfFile | None


@dataclass
class _Lane:
    files: Sequence[PlannedFile]
    messages: SimpleQueue[_Message] = field(default_factory=SimpleQueue)
    fed_nbytes: int = 0


class SaveJob:
    """One rank's part of one save.

    Args:
        filesystem: the checkpoint.
        lanes: the files, in lanes.
        new_record_maker: makes the record maker of a file.
        resolve: gives an item's data; called on the calling thread.
        options: see `SaveOptions`.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        lanes: Sequence[Sequence[PlannedFile]],
        new_record_maker: Callable[[], RecordMaker],
        resolve: Callable[[WriteItem], Any],
        options: SaveOptions,
    ) -> None:
        self._filesystem = filesystem
        self._lanes = [_Lane(files) for files in lanes]
        self._new_record_maker = new_record_maker
        self._resolve = resolve
        self._options = options
        most = BUFFERS_PER_THREAD * (options.thread_count + len(lanes))
        self._host_pool = BufferPool(HOST_BUFFER_NBYTES, options.host_memory_budget, most)
        self._cuda_pool: BufferPool | None = None
        self._host_tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._cuda_tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._opened: list[str] = []
        self._results: list[WriteResult] = []
        self._busy: dict[str, list[float]] = {"encode": [], "write": []}
        self.totals = RankTotals()

    def run(self) -> list[WriteResult]:
        """Write all files.

        Returns:
            One result per item.

        Raises:
            BaseException: the first error of any thread. What was written is removed.
        """
        threads = [threading.Thread(target=self._write_lane, args=(lane,), name="dcp-write") for lane in self._lanes]
        for _ in range(self._options.thread_count):
            threads.append(threading.Thread(target=self._encode, args=(self._host_tasks,), name="dcp-encode"))
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            self._feed(started)
        except Cancelled:
            pass
        except BaseException as error:  # KeyboardInterrupt too must not leave threads and files behind
            self._fail(error)
        for lane in self._lanes:
            lane.messages.put(None)
        for thread in started:
            if thread.name == "dcp-encode":
                self._host_tasks.put(None)
        self._cuda_tasks.put(None)
        join_all(started, self._fail)
        self.totals.seconds.update({stage: max(spent, default=0.0) for stage, spent in self._busy.items()})
        if self._error is not None:
            self._remove_files()
            raise self._error
        return self._results

    def _remove_files(self) -> None:
        try:
            self._filesystem.remove(self._opened)
        except StorageError as error:  # must not hide the error that stopped the save
            logger.warning("Could not remove the files of a failed save: %s", error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._host_pool.close()
        if self._cuda_pool is not None:
            self._cuda_pool.close()

    # --- calling thread ---------------------------------------------------------------------------------------------

    def _feed(self, started: list[threading.Thread]) -> None:
        """Hand out all tasks, always to the lane that has got least, so that lanes end together."""
        feeds = [(lane, self._feed_lane(lane)) for lane in self._lanes]
        while feeds:
            lane, tasks = min(feeds, key=lambda feed: feed[0].fed_nbytes)
            task = next(tasks, None)
            if task is None:
                feeds.remove((lane, tasks))
                continue
            if self._error is not None:
                raise Cancelled
            assert task.source is not None
            on_cuda = task.source.on_cuda_engine
            if on_cuda and not any(thread.name == "dcp-cuda" for thread in started):
                thread = threading.Thread(target=self._encode, args=(self._cuda_tasks,), name="dcp-cuda")
                thread.start()
                started.append(thread)
            lane.messages.put(task)
            (self._cuda_tasks if on_cuda else self._host_tasks).put(task)

    def _feed_lane(self, lane: _Lane) -> Iterator[_Task]:
        for file in lane.files:
            lane.messages.put(file)
            maker = self._new_record_maker()
            for item in file.items:
                for record in maker.add(item, self._resolve(item)):
                    yield from self._feed_record(lane, record)
            for record in maker.flush():
                yield from self._feed_record(lane, record)
            lane.messages.put(_EndOfFile())

    def _feed_record(self, lane: _Lane, record: PendingRecord) -> Iterator[_Task]:
        lane.messages.put(record)
        lane.fed_nbytes += record.nbytes
        pool = self._pool_for(record)
        boxes: list[Box] = []
        room = pool.buffer_nbytes
        for number in range(record.grid.block_count):
            box = record.grid.box(number)
            needs = record.chain.max_encoded_nbytes(box.elements * record.element.nbytes)
            if boxes and (needs > room or not record.source.on_cuda_engine):
                yield _Task(record.source, boxes, record.chain, pool, pool.take())
                boxes, room = [], pool.buffer_nbytes
            boxes.append(box)
            room -= needs
        if boxes:
            yield _Task(record.source, boxes, record.chain, pool, pool.take())

    def _pool_for(self, record: PendingRecord) -> BufferPool:
        if not record.source.on_cuda_engine:
            assert not isinstance(record.chain.coder, Ans)
            return self._host_pool
        if self._cuda_pool is None:
            self._cuda_pool = BufferPool(CUDA_BUFFER_NBYTES, self._options.host_memory_budget, 8, pinned_allocate)
        return self._cuda_pool

    # --- encode threads ---------------------------------------------------------------------------------------------

    def _encode(self, tasks: SimpleQueue[_Task | None]) -> None:
        bench, busy = Workbench(self._options.device_memory_budget), 0.0
        while (task := tasks.get()) is not None:
            start = time.perf_counter()
            try:
                if self._error is None:
                    assert task.source is not None
                    task.blocks = task.source.encode(task.boxes, task.chain, task.buffer, bench)
            except BaseException as error:
                task.error = error
            task.source = None  # the tensor may be freed while the block waits to be written
            task.done.release()
            busy += time.perf_counter() - start
        self._busy["encode"].append(busy)

    # --- write threads ----------------------------------------------------------------------------------------------

    def _write_lane(self, lane: _Lane) -> None:
        output: OpenFile | None = None
        busy = 0.0
        while (message := lane.messages.get()) is not None:
            if isinstance(message, _Task):
                message.done.acquire()
            start = time.perf_counter()
            try:
                if self._error is None:
                    output = self._handle(message, output)
            except BaseException as error:
                self._fail(error)
            if isinstance(message, _Task):
                message.pool.give_back(message.buffer)
            busy += time.perf_counter() - start
        if output is not None:
            output.stream.abort()
        self._busy["write"].append(busy)

    def _handle(
        self, message: PlannedFile | PendingRecord | _Task | _EndOfFile, output: OpenFile | None
    ) -> OpenFile | None:
        if isinstance(message, PlannedFile):
            opened = OpenFile(
                self._filesystem.open_output(message.name), message.name, self._options.identity, self._options.progress
            )
            self._opened.append(message.name)  # only now: a file that could not be made is not ours to remove
            return opened
        assert output is not None
        if isinstance(message, PendingRecord):
            output.begin(message)
        elif isinstance(message, _Task):
            if message.error is not None:
                raise message.error
            output.append(message.blocks)
        else:
            file = output.finish()
            with self._lock:
                self.totals.files[file[0]] = file[1]
                for codec, dtype, totals in output.totals:
                    self.totals.add(codec, dtype, totals)
                self._results.extend(output.results(file))
            return None
        return output
