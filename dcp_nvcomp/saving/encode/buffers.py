"""Memory of a save that writes what it encodes at once: reused buffers, bounded by the user's budget.

A buffer is reserved for each task before it is handed out; an encoder takes one, fills it and hands it over; the thread
that writes it gives it back.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from dcp_nvcomp.codecs.encoded import EncodedBlock
from dcp_nvcomp.engines.memory import PinnedMemory, pinned_allocate, plain_allocate
from dcp_nvcomp.saving.encode.memory import Cancelled, JobMemory, Room, TaskMemory

HOST_ROOM_NBYTES = (1 << 20) + (64 << 10)  # a block of 1 MiB and the padding of its slices
_BUFFERS_PER_THREAD = 8
_CUDA_BUFFERS = 8
# A block of 4 MiB, as ANS has them, with the padding of its slices, must fit.
_MIN_CUDA_ROOM_NBYTES = 8 << 20
# Thousands of slices, which is what a large GPU needs to be busy.
_MAX_CUDA_ROOM_NBYTES = 256 << 20


def cuda_room_nbytes(budget_nbytes: int, state_nbytes: int) -> int:
    """Return the size of the room for one batch of the CUDA engine."""
    # three of them: two engines each fill one while the third is written
    wanted = min(budget_nbytes // 3, state_nbytes // 4, _MAX_CUDA_ROOM_NBYTES)
    return 1 << (max(wanted, _MIN_CUDA_ROOM_NBYTES).bit_length() - 1)


class _Buffer(Room):
    __slots__ = ("pool",)

    def __init__(self, view: memoryview, pool: BufferPool) -> None:
        self.view, self.pool = view, pool

    def keep(self, blocks: list[EncodedBlock], nbytes: int) -> list[EncodedBlock]:
        return blocks

    def release(self) -> None:
        self.pool.give_back(self)


class BufferPool(TaskMemory):
    """A bounded set of equal buffers, allocated as they are first needed.

    Who hands out work reserves a buffer for each piece of it, which may wait, and the thread that does the work takes
    one of those that are free, which never waits. So work may be handed out far ahead, but only as many buffers are
    ever touched as are full at once; and the one that was given back last, which caches still hold, is the next taken.

    Attributes:
        room_nbytes: size of each buffer.
        limit_nbytes: the most that all buffers take together.
    """

    def __init__(
        self,
        room_nbytes: int,
        budget_nbytes: int,
        most: int,
        allocate: Callable[[int], memoryview] = plain_allocate,
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
        """Take back a buffer; any thread may."""
        self._free.append(buffer)
        self._unreserved.put(True)

    def close(self) -> None:
        """Wake the thread that waits in `reserve`."""
        self._unreserved.put(False)


class BufferMemory(JobMemory):
    """Buffers of one save, a pool for each kind of engine."""

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
