"""Host memory for what is staged: large segments, in which each task takes what it came to.

The segments of a save are filled front to back, and free again when all in them is written. Room is reserved before a
task is handed out, in the order in which lanes write, so no save hangs for lack of memory: a task that was handed out
never waits, and all but a lane's first and last segment are full of what is still to be written.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.codecs.encoded_run import encoded_nbytes
from dcp_nvcomp.engines.tensors import PinnedMemory, fresh_allocate, pinned_allocate
from dcp_nvcomp.saving.encode.tasks import HOST_ROOM_NBYTES, Cancelled, JobMemory, Room, TaskMemory

logger = logging.getLogger(__name__)

# Of a segment, at most the room of one task stays unused: a fifteenth, or an eighth with CUDA engines.
HOST_SEGMENT_NBYTES = 16 << 20
_ROOMS_OF_CUDA_SEGMENT = 8
_MIN_CUDA_ROOM_NBYTES = 8 << 20
_MAX_CUDA_ROOM_NBYTES = 64 << 20
_MIN_BUDGET_NBYTES = 64 << 20  # so that all threads encode a small state at once
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def default_budget_nbytes(state_nbytes: int, in_use_nbytes: int) -> int:
    """Return the smaller of twice the state's size and a quarter of what the host has free for each of its ranks.

    A small state has room beside what the saves of other states hold: training would wait until these are written.
    """
    wanted = max(2 * state_nbytes, _MIN_BUDGET_NBYTES)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's
    free = free_nbytes()
    if free is not None:
        wanted = min(wanted, free // 4 // (int(ranks) if ranks.isdecimal() and int(ranks) else 1))
    return wanted if 2 * state_nbytes > _MIN_BUDGET_NBYTES else wanted + in_use_nbytes


def free_nbytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return how much memory processes may still take: of the machine, or of the container; None if unknown."""
    found = []
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(int(value.split()[0]) << 10)
    limit, used = (" ".join(_lines(cgroup / name)) for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():  # else it is "max", or there is no such limit
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return ()


class Segment:
    __slots__ = ("in_use", "is_full", "position", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.begin()

    def begin(self) -> None:
        self.position = 0  # where free memory begins
        self.in_use = 0  # tasks that take memory of it
        self.is_full = False  # no task will be added


class SegmentStore:
    """Segments of one kind of memory that no save uses. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Segment] = []

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(len(segment.view) for segment in self._free)

    def take(self, nbytes: int, allocate: Callable[[int], memoryview]) -> Segment:
        """Return a segment of `nbytes`: the one given back last, or a new one; those of another size are let go."""
        with self._lock:
            while self._free:
                segment = self._free.pop()
                if len(segment.view) == nbytes:
                    segment.begin()
                    return segment
        return Segment(allocate(nbytes))

    def give_back(self, segment: Segment) -> None:
        with self._lock:
            self._free.append(segment)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


class StagingBudget:
    """What all asynchronous saves of a process have reserved and staged."""

    def __init__(self) -> None:
        self._in_use_nbytes = 0
        self._changed = threading.Condition()

    @property
    def in_use_nbytes(self) -> int:
        return self._in_use_nbytes

    def reserve(self, nbytes: int, limit_nbytes: int, give_up: Callable[[], bool]) -> bool:
        """Reserve `nbytes` once no more than `limit_nbytes` are in use with them."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_use_nbytes + nbytes <= limit_nbytes or give_up())
            if self._in_use_nbytes + nbytes > limit_nbytes:
                return False
            self._in_use_nbytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self._in_use_nbytes -= nbytes
            self._changed.notify_all()


class SegmentStores:
    def __init__(self) -> None:
        self.plain, self.pinned, self.budget = SegmentStore(), SegmentStore(), StagingBudget()

    def clear(self) -> None:
        self.plain.clear()
        self.pinned.clear()


class _Staged(Room):
    """Room at the end of a segment; once encoded, as much of it as the task came to."""

    __slots__ = ("kept_nbytes", "lane", "segment")

    def __init__(self, lane: _LaneMemory, segment: Segment) -> None:
        self.view = segment.view[segment.position :]
        self.lane, self.segment, self.kept_nbytes = lane, segment, lane.room_nbytes

    def keep(self, blocks: Sequence[EncodedBlock], nbytes: int) -> Sequence[EncodedBlock]:
        if encoded_nbytes(blocks) < nbytes:
            blocks, nbytes = _without_gaps(blocks, self.view)
        self.kept_nbytes = nbytes
        self.lane.filled(self.segment, nbytes)
        return blocks

    def release(self) -> None:
        self.lane.written(self.segment, self.kept_nbytes)


def _without_gaps(blocks: Sequence[EncodedBlock], out: memoryview) -> tuple[list[EncodedBlock], int]:
    """Move blocks together, while they are still in the cache, and return them and where the last one ends."""
    start, position = _address(out), 0
    moved: list[EncodedBlock] = []
    for block in blocks:
        nbytes, begin = len(block.data), _address(block.data)
        if begin != start + position:
            assert begin > start + position, "not in their order"
            ctypes.memmove(start + position, begin, nbytes)
            block = replace(block, data=out[position : position + nbytes])
        moved.append(block)
        position += nbytes
    return moved, position


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address


class _LaneMemory(TaskMemory):
    """Segments that tasks of one lane fill, as many at a time as threads encode for it."""

    def __init__(
        self,
        memory: StagingMemory,
        store: SegmentStore,
        allocate: Callable[[int], memoryview],
        *,
        segment_nbytes: int,
        room_nbytes: int,
    ) -> None:
        self.room_nbytes = room_nbytes
        self._memory = memory
        self._store = store
        self._allocate = allocate
        self._segment_nbytes = segment_nbytes
        self._lock = threading.Lock()
        self._open: list[Segment] = []  # those that no thread fills just now
        self._taken: set[Segment] = set()

    def reserve(self) -> None:
        self._memory.reserve(self.room_nbytes)

    def unreserve(self) -> None:
        self._memory.give_back(self.room_nbytes)

    def take(self) -> _Staged:
        with self._lock:
            if self._open:
                segment = self._open.pop()
            else:
                segment = self._store.take(self._segment_nbytes, self._allocate)
                self._taken.add(segment)
            segment.in_use += 1
        return _Staged(self, segment)

    def filled(self, segment: Segment, nbytes: int) -> None:
        with self._lock:
            segment.position += nbytes
            segment.is_full = len(segment.view) - segment.position < self.room_nbytes
            if not segment.is_full:
                self._open.append(segment)
        self._memory.encoded(nbytes, self.room_nbytes)

    def written(self, segment: Segment, nbytes: int) -> None:
        with self._lock:
            segment.in_use -= 1
            is_free = segment.is_full and not segment.in_use
            if is_free:
                self._taken.remove(segment)
        if is_free:
            self._store.give_back(segment)
        self._memory.give_back(nbytes)

    def end(self) -> None:
        while self._taken:
            self._store.give_back(self._taken.pop())


class StagingMemory(JobMemory):
    def __init__(self, stores: SegmentStores, budget_nbytes: int, *, state_nbytes: int, may_use_cuda: bool) -> None:
        self.staged_nbytes = 0
        self._stores = stores
        wanted = max(_MIN_CUDA_ROOM_NBYTES, min(state_nbytes // 8, budget_nbytes // 8, _MAX_CUDA_ROOM_NBYTES))
        self._cuda_room_nbytes = 1 << (wanted.bit_length() - 1)  # torch rounds page-locked memory up to a power of two
        self._budget_nbytes = max(budget_nbytes, 2 * (self._cuda_room_nbytes if may_use_cuda else HOST_ROOM_NBYTES))
        self._pinned = PinnedMemory(pinned_allocate)
        self._held_nbytes = 0
        self._lock = threading.Lock()
        self._closed = False
        self._unencoded = 0
        self._has_waited = False
        self._lanes: dict[tuple[int, bool], _LaneMemory] = {}
        # Writing would take the cores from encoding, for which the caller waits; but a GPU does not need them.
        self._may_write = threading.Event()
        if may_use_cuda:
            self._may_write.set()

    def host(self, lane: int) -> TaskMemory:
        return self._lane((lane, False))

    def cuda(self, lane: int) -> TaskMemory:
        return self._lane((lane, True))

    def _lane(self, key: tuple[int, bool]) -> _LaneMemory:
        if key not in self._lanes:  # only the thread that feeds asks
            is_cuda, room_nbytes = key[1], self._cuda_room_nbytes
            self._lanes[key] = _LaneMemory(
                self,
                self._stores.pinned if is_cuda else self._stores.plain,
                self._pinned.allocate if is_cuda else fresh_allocate,
                segment_nbytes=_ROOMS_OF_CUDA_SEGMENT * room_nbytes if is_cuda else HOST_SEGMENT_NBYTES,
                room_nbytes=room_nbytes if is_cuda else HOST_ROOM_NBYTES,
            )
        return self._lanes[key]

    def reserve(self, nbytes: int) -> None:
        """Reserve memory for a task; if there is none, wait until others are encoded, and then for writing."""
        reserve, limit = self._stores.budget.reserve, self._budget_nbytes
        # a task comes to less than is reserved for it, so while some are not encoded, room may yet be found
        if not reserve(nbytes, limit, lambda: self._closed or not self._unencoded):
            self._wait_no_longer_to_write()
            if not reserve(nbytes, limit, lambda: self._closed):
                raise Cancelled
        with self._lock:
            self._held_nbytes += nbytes
            self._unencoded += 1

    def _wait_no_longer_to_write(self) -> None:
        self._may_write.set()
        if not self._has_waited and not self._closed:
            self._has_waited = True
            logger.warning(
                "Staging waits for writing: the encoded state does not fit into staging_budget_nbytes=%d.",
                self._budget_nbytes,
            )

    def encoded(self, nbytes: int, reserved_nbytes: int) -> None:
        """A task came to `nbytes` of what was reserved for it."""
        with self._lock:
            self.staged_nbytes += nbytes
            self._unencoded -= 1
        self.give_back(reserved_nbytes - nbytes)

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._held_nbytes -= nbytes
        self._stores.budget.give_back(nbytes)

    def wait_to_write(self) -> None:
        self._may_write.wait()

    def begin_to_write(self) -> None:
        self._may_write.set()

    def close(self) -> None:
        self._closed = True
        self._stores.budget.give_back(0)  # wakes waiting threads
        self._may_write.set()

    def end(self) -> None:
        """Give back everything, once the threads of the save have ended: tasks that were never encoded hold room."""
        for lane in self._lanes.values():
            lane.end()
        self._lanes.clear()
        self.give_back(self._held_nbytes)
