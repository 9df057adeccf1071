"""From records to tasks, units that one thread encodes and another writes, and the memory that they are encoded into.

A task gathers blocks of consecutive records of one file: about 1 MiB for the CPU engine, so that little time goes into
handing over; far more for the CUDA engine, which wants thousands of slices at once.

feeding thread   reserves room for a task, which may wait: that is how a slow sink holds back the encoders
encode thread    takes a room that was reserved, which never waits, fills it, says how much it keeps
write thread     releases the room when its blocks are written
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.codecs.choose import most_encoded_nbytes
from dcp_nvcomp.engines.tensors import PinnedMemory, pinned_allocate, plain_allocate
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.saving.encode.sources import ChainChoice, Part, PendingRecord, Source


class Task:
    """Blocks of consecutive records of one file, and the records that begin among them."""

    __slots__ = ("blocks", "done", "memory", "parts", "records", "room")

    def __init__(self) -> None:
        self.parts: list[Part] = []  # by one engine; dropped once encoded, so that tensors may be freed before writing
        # of each the number of its blocks here, and whether it begins here
        self.records: list[tuple[PendingRecord, int, bool]] = []
        self.memory: TaskMemory | None = None
        self.room: Room | None = None
        self.blocks: Sequence[EncodedBlock] = ()
        # held until encoded: a lock and not an Event, which takes ten times as long (4 us) for each block of 1 MiB
        self.done = threading.Lock()
        self.done.acquire()

    @property
    def cuda_device(self) -> torch.device | None:
        return self.parts[0].source.cuda_device if self.parts else None

    def take(self) -> memoryview:
        """Take the memory that was reserved for it."""
        assert self.memory is not None
        self.room = self.memory.take()
        return self.room.view

    def release(self) -> None:
        if self.room is not None:
            self.room.release()
        elif self.memory is not None:
            self.memory.unreserve()


class Tasks:
    """Gathers the records of one file after the other. Room is reserved only for a task that is complete."""

    def __init__(self, memory_for: Callable[[Source], TaskMemory]) -> None:
        self._memory_for = memory_for
        self._task = Task()
        self._device: torch.device | None = None  # of its parts
        self._memory: TaskMemory | None = None
        self._room_nbytes = 0

    def add(self, record: PendingRecord, source: Source) -> Iterator[Task]:
        grid, choice, device = record.grid, record.choice, source.cuda_device
        chain, element_nbytes = record.record.chain, record.record.element.nbytes
        most_nbytes = most_encoded_nbytes if chain is None else chain.max_encoded_nbytes
        # a record without elements has nothing to encode, but begins all the same, and in its turn
        if grid.block_count:
            if self._task.parts and device != self._device:
                yield from self.flush()
            if not self._task.parts:
                self._begin(source)
        begins = True
        boxes: list[Box] = []  # `list[Box]()` takes a quarter of a microsecond more
        for number in range(grid.block_count):
            box = grid.box(number)
            needs = most_nbytes(box.elements * element_nbytes)
            if needs > self._room_nbytes and (boxes or self._task.parts):
                if boxes:
                    self._append(record, source, choice, boxes, begins)
                    begins, boxes = False, []
                yield from self.flush()
                self._begin(source)
            boxes.append(box)
            self._room_nbytes -= needs
        self._append(record, source, choice, boxes, begins)

    def _begin(self, source: Source) -> None:
        """Find the memory for a task that has no blocks yet."""
        self._device, self._memory = source.cuda_device, self._memory_for(source)
        self._room_nbytes = self._memory.room_nbytes

    def _append(
        self, record: PendingRecord, source: Source, choice: ChainChoice, boxes: list[Box], begins: bool
    ) -> None:
        self._task.records.append((record, len(boxes), begins))
        if boxes:
            self._task.parts.append(Part(source, choice, boxes))

    def flush(self) -> Iterator[Task]:
        task, self._task = self._task, Task()
        if task.parts:
            assert self._memory is not None
            self._memory.reserve()
            task.memory = self._memory
        if task.records:
            yield task


HOST_ROOM_NBYTES = (1 << 20) + (64 << 10)  # a block of 1 MiB and the padding of its slices
_BUFFERS_PER_THREAD = 8
_CUDA_BUFFERS = 8
# A block of 4 MiB, as ANS has them, with the padding of its slices, must fit.
_MIN_CUDA_ROOM_NBYTES = 8 << 20
# Thousands of slices, which is what a large GPU needs to be busy.
_MAX_CUDA_ROOM_NBYTES = 256 << 20


class Cancelled(Exception):
    """The save failed while a thread waited for memory."""


class Room(ABC):
    """Memory for the encoded blocks of one task."""

    __slots__ = ("view",)

    view: memoryview

    @abstractmethod
    def keep(self, blocks: Sequence[EncodedBlock], nbytes: int) -> Sequence[EncodedBlock]:
        """Say what is needed from now on; on the thread that encodes."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back; any thread may."""


class TaskMemory(ABC):
    """Rooms of one size."""

    room_nbytes: int

    @abstractmethod
    def reserve(self) -> None:
        """Reserve a room; wait until there is one. Only for one thread."""

    @abstractmethod
    def take(self) -> Room:
        """Return a room that was reserved; any thread may."""

    @abstractmethod
    def unreserve(self) -> None:
        """Give up a reservation that was not used; any thread may."""


class JobMemory(ABC):
    """The memory of one save job."""

    @abstractmethod
    def host(self, lane: int) -> TaskMemory:
        """Return where tasks of the CPU engine are encoded."""

    @abstractmethod
    def cuda(self, lane: int) -> TaskMemory:
        """Return where tasks of CUDA engines are encoded."""

    @abstractmethod
    def wait_to_write(self) -> None:
        """Wait until written blocks are wanted; called once by each write thread."""

    @abstractmethod
    def close(self) -> None:
        """Wake all that wait, because the save failed."""


def cuda_room_nbytes(budget_nbytes: int, state_nbytes: int) -> int:
    # three of them: two engines each fill one while the third is written
    wanted = min(budget_nbytes // 3, state_nbytes // 4, _MAX_CUDA_ROOM_NBYTES)
    return 1 << (max(wanted, _MIN_CUDA_ROOM_NBYTES).bit_length() - 1)


class _Buffer(Room):
    __slots__ = ("pool",)

    def __init__(self, view: memoryview, pool: BufferPool) -> None:
        self.view, self.pool = view, pool

    def keep(self, blocks: Sequence[EncodedBlock], nbytes: int) -> Sequence[EncodedBlock]:
        return blocks

    def release(self) -> None:
        self.pool.give_back(self)


class BufferPool(TaskMemory):
    """A bounded set of equal buffers, allocated as they are first needed.

    The thread that hands out work reserves a buffer for each piece, which may wait, and the thread that does it takes
    one of those that are free, which never waits. So work may be handed out far ahead, but only as many buffers are
    ever touched as are full at once; and the one that was given back last, which caches still hold, is the next taken.
    """

    def __init__(
        self, room_nbytes: int, budget_nbytes: int, most: int, allocate: Callable[[int], memoryview] = plain_allocate
    ) -> None:
        self.room_nbytes = room_nbytes
        count = max(2, min(most, budget_nbytes // room_nbytes))
        self.limit_nbytes = count * room_nbytes
        self._allocate = allocate
        # one True for each buffer that is not reserved
        self._unreserved: SimpleQueue[bool] = SimpleQueue()
        for _ in range(count):
            self._unreserved.put(True)
        self._free: list[_Buffer] = []

    def reserve(self) -> None:
        if not self._unreserved.get():
            raise Cancelled

    def take(self) -> _Buffer:
        try:
            return self._free.pop()
        except IndexError:
            return _Buffer(self._allocate(self.room_nbytes), self)

    def unreserve(self) -> None:
        self._unreserved.put(True)

    def give_back(self, buffer: _Buffer) -> None:
        self._free.append(buffer)
        self._unreserved.put(True)

    def close(self) -> None:
        self._unreserved.put(False)


class BufferMemory(JobMemory):
    def __init__(self, budget_nbytes: int, *, threads: int, state_nbytes: int, may_use_cuda: bool) -> None:
        # enough to keep every thread busy, plus read-ahead within the budget to absorb tensors that encode slower than
        # they write
        most = max(_BUFFERS_PER_THREAD * threads, budget_nbytes // 16 // HOST_ROOM_NBYTES)
        # if a GPU may take part, most of the budget is for its larger batches
        self.host_pool = BufferPool(HOST_ROOM_NBYTES, budget_nbytes // (4 if may_use_cuda else 1), most)
        budget_nbytes -= self.host_pool.limit_nbytes
        self.cuda_pool = BufferPool(
            cuda_room_nbytes(budget_nbytes, state_nbytes),
            budget_nbytes,
            _CUDA_BUFFERS,
            PinnedMemory(pinned_allocate).allocate,
        )

    def host(self, lane: int) -> BufferPool:
        return self.host_pool

    def cuda(self, lane: int) -> BufferPool:
        return self.cuda_pool

    def wait_to_write(self) -> None:
        pass

    def close(self) -> None:
        self.host_pool.close()
        self.cuda_pool.close()
