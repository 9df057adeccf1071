"""The save of one rank's data files: encode, stage and write at the same time.

    calling thread   resolves items, makes records, gathers them in tasks, hands out each in order, room reserved for it
    encode threads   take and fill the rooms, in any order: `thread_count` with the CPU engine, two with CUDA engines
    write threads    one per lane: append the blocks of the lane's files in order, release the rooms

A lane is a list of files that are written one after the other; lanes are written at the same time. This cannot
deadlock: no task waits for memory once it is handed out, and the oldest of those handed out is always the next one that
its lane writes. The first error stops everything.

In the background process encoding gives way to training (`BackgroundThrottle`): its threads have the lowest priority.
Without privileges no thread may raise its priority again, so as many ordinary ones wait for when the save has to hurry.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.codecs.encoded_run import recoded, uncompressed_nbytes
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda.pool import ENGINES_PER_DEVICE
from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.footer import FileIdentity
from dcp_nvcomp.saving.data_files import DataFileWriter, PlannedFile, WrittenFile, small_together
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.encode.sources import Source, Workbench, encode_parts
from dcp_nvcomp.saving.encode.tasks import JobMemory, Task, TaskMemory, Tasks
from dcp_nvcomp.saving.save_options import SaveOptions
from dcp_nvcomp.saving.stats import RankTotals
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)

_CUDA_THREADS = ENGINES_PER_DEVICE + 1  # one compares what has arrived, while the engines work for the others
_LOOKS_SECONDS = 0.05  # how often it is asked whether to hurry
_LOWEST = 19
_OF_THE_TIME = 0.8  # by then it should be done
_BEHIND = 0.2  # so much of it may be late: pace is uneven, and the process may still be starting


@dataclass(frozen=True)
class _EndOfFile:
    """The last message of a file."""


_Message = PlannedFile | Task | _EndOfFile | None


@dataclass
class _Lane:
    number: int
    files: Sequence[PlannedFile]
    messages: SimpleQueue[_Message] = field(default_factory=SimpleQueue)
    fed_nbytes: int = 0


class SaveJob:
    def __init__(
        self,
        options: SaveOptions,
        identity: FileIdentity,
        filesystem: Filesystem,
        lanes: Sequence[Sequence[PlannedFile]],
        resolve: Callable[[WriteItem], Any],
        *,
        hashes: Mapping[MetadataIndex, str],
        derived: Mapping[MetadataIndex, MetadataIndex],
        engine: EngineChoice,
        remembered: RememberedChoices,
        memory: JobMemory,
        progress: Callable[[int], None],
        on_staged: Callable[[], None] | None,
        throttle: BackgroundThrottle | None,
    ) -> None:
        self._filesystem, self._options, self._identity = filesystem, options, identity
        self._lanes = [_Lane(number, files) for number, files in enumerate(lanes)]
        self._resolve, self._engine, self._remembered = resolve, engine, remembered
        self._hashes, self._derived = hashes, derived
        check = options.check_encodes == "all"
        self._policy = engine.policy(options.device_memory_budget, check_encodes=check)
        self._memory, self._progress, self._throttle = memory, progress, throttle
        self._host_tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._cuda_tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._cuda_threads = 0
        queues: list[SimpleQueue[Any]] = [*(lane.messages for lane in self._lanes), self._host_tasks, self._cuda_tasks]
        self._workers = WorkerGroup(queues, memory.close)
        self._on_staged = on_staged
        self._unstaged = 1  # tasks that are not encoded yet, and the feeding of them
        self._lock = threading.Lock()
        self._opened: list[str] = []
        self._written: list[WrittenFile] = []
        self._busy: dict[str, list[float]] = {"encode": [], "write": []}
        self.totals = RankTotals()

    def run(self) -> list[WrittenFile]:
        try:
            self._workers.run(self._start_and_feed)
        except BaseException:
            self._remove_files()
            raise
        self.totals.seconds.update({stage: max(spent, default=0.0) for stage, spent in self._busy.items()})
        return self._written

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
            if self._throttle is None:
                self._workers.start("dcp-encode", self._encode, self._host_tasks)
            else:
                self._workers.start("dcp-encode", self._encode_throttled, self._throttle)
                self._workers.start("dcp-hurry", self._encode_unthrottled, self._throttle)
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
            with self._lock:
                self._unstaged += 1
            # the writer waits for whatever it is given, so it is given the task when nothing can come between any more
            if not task.parts:
                task.done.release()
                self._staged_one()
            elif task.cuda_device is None:
                self._host_tasks.put(task)
            else:
                if self._cuda_threads < _CUDA_THREADS:
                    self._cuda_threads += 1
                    self._workers.start("dcp-cuda", self._encode, self._cuda_tasks)
                self._cuda_tasks.put(task)
            lane.messages.put(task)
        self._staged_one()

    def _staged_one(self) -> None:
        with self._lock:
            self._unstaged -= 1
            is_last = not self._unstaged
        if is_last and self._on_staged is not None and self._workers.error is None:
            self._on_staged()

    def _feed_lane(self, lane: _Lane) -> Iterator[Task]:
        tasks, chooser = Tasks(partial(self._memory_for, lane.number)), self._options.chooser
        for file in lane.files:
            lane.messages.put(file)
            pack = self._options.single_file_per_rank
            maker = RecordMaker(
                chooser, self._engine, self._remembered, pack=pack, hashes=self._hashes, derived=self._derived
            )
            for items in small_together(file.items):
                resolved = [(item, self._resolve(item)) for item in items]
                # a copy from a device may wait for it, and nothing should wait while the collector is paused
                on_host = all(not isinstance(data, torch.Tensor) or data.device.type == "cpu" for _, data in resolved)
                with collector_paused() if on_host else nullcontext():
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

    def _memory_for(self, lane: int, source: Source) -> TaskMemory:
        return self._memory.host(lane) if source.cuda_device is None else self._memory.cuda(lane)

    # --- encode threads ---------------------------------------------------------------------------------------------

    def _encode(self, tasks: SimpleQueue[Task | None]) -> None:
        bench: Workbench | None = None
        busy, again = 0.0, 0
        while (task := tasks.get()) is not None:
            start = time.perf_counter()
            try:
                if self._workers.error is None:
                    # only now: whatever fails, the tasks have to be taken, because writers wait for them
                    bench = bench or Workbench(self._policy)
                    encoded = encode_parts(task.parts, task.take, bench)
                    assert task.room is not None
                    task.blocks = task.room.keep(*encoded)
                    if self._throttle is not None:
                        self._throttle.encoded(uncompressed_nbytes(task.blocks))
                    again += recoded(task.blocks)
            except BaseException as error:
                self._workers.fail(error)
            task.parts = []
            task.done.release()
            try:
                self._staged_one()
            except BaseException as error:
                self._workers.fail(error)
            busy += time.perf_counter() - start
        tasks.put(None)  # for the next of the threads that share this queue
        self._busy["encode"].append(busy - (bench.waited_seconds if bench is not None else 0.0))
        with self._lock:
            self.totals.recoded_blocks += again

    def _encode_throttled(self, throttle: BackgroundThrottle) -> None:
        throttle.give_way()
        self._encode(self._host_tasks)

    def _encode_unthrottled(self, throttle: BackgroundThrottle) -> None:
        while not throttle.wait(_LOOKS_SECONDS):
            if not self._unstaged or self._workers.error is not None:
                return
        self._encode(self._host_tasks)

    # --- write threads ----------------------------------------------------------------------------------------------

    def _write_lane(self, lane: _Lane) -> None:
        output: DataFileWriter | None = None
        busy = 0.0
        self._memory.wait_to_write()
        while (message := lane.messages.get()) is not None:
            if isinstance(message, Task):
                message.done.acquire()
            start = time.perf_counter()
            try:
                if self._workers.error is None:
                    output = self._handle(message, output)
            except BaseException as error:
                self._workers.fail(error)
            if isinstance(message, Task):
                message.release()
            busy += time.perf_counter() - start
        if output is not None:
            output.stream.abort()
        self._busy["write"].append(busy)

    def _handle(self, message: PlannedFile | Task | _EndOfFile, output: DataFileWriter | None) -> DataFileWriter | None:
        if isinstance(message, PlannedFile):
            opens = self._filesystem.open_replacement if message.replaces else self._filesystem.open_output
            opened = DataFileWriter(opens(message.name), message.name, self._identity, self._progress)
            if not message.replaces:
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
            written = output.finish()
            with self._lock:
                self.totals.files[written.file.name] = written.file.nbytes
                self.totals.add(output.totals)
                self._written.append(written)
            return None
        return output


class BackgroundThrottle:
    """Whether one save may still give way."""

    def __init__(self, within_seconds: float | None = None) -> None:
        self._nbytes = 0
        self._within_seconds = within_seconds
        self._began_seconds = time.perf_counter()
        self._done_nbytes = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def begin(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def hurry(self) -> None:
        self._is_over.set()

    def encoded(self, nbytes: int) -> None:
        with self._lock:
            self._done_nbytes += nbytes

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until the save has to hurry: if told to, or falling behind. Return whether it has."""
        if self._is_late():
            self.hurry()
        return self._is_over.wait(seconds)

    def _is_late(self) -> bool:
        if self._within_seconds is None:
            return False
        spent = time.perf_counter() - self._began_seconds
        wanted = spent / (self._within_seconds * _OF_THE_TIME) - _BEHIND
        return self._done_nbytes < self._nbytes * min(wanted, 1.0)

    def give_way(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        except OSError:  # a sandbox may forbid even that
            self.hurry()
