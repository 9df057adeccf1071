"""Host memory for encoded blocks: a pool of reused buffers, bounded by the user's budget.

A buffer is reserved for each task before it is handed out; an encoder takes one, fills it and hands it over; the thread
that writes it gives it back. While all are reserved, `reserve` waits: that is how a slow sink holds back the encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from dcp_nvcomp.engines.memory import plain_allocate

__all__ = ["BufferPool", "Cancelled", "cuda_buffer_nbytes"]


# A block of 4 MiB, as ANS has them, with the padding of its slices, must fit.
_MIN_CUDA_BUFFER_NBYTES = 8 << 20
# Thousands of slices, which is what a large GPU needs to be busy.
_MAX_CUDA_BUFFER_NBYTES = 256 << 20


def cuda_buffer_nbytes(budget_nbytes: int, state_nbytes: int) -> int:
    """Return the size of a buffer for one batch of the CUDA engine.

    Args:
        budget_nbytes: limit of all buffers together.
        state_nbytes: size of the state: even a small one should be encoded, copied and written at the same time.

    Returns:
        A power of two, as torch rounds page-locked memory up to one.
    """
    # three of them: two engines each fill one while the third is written
    wanted = min(budget_nbytes // 3, state_nbytes // 4, _MAX_CUDA_BUFFER_NBYTES)
    return 1 << (max(wanted, _MIN_CUDA_BUFFER_NBYTES).bit_length() - 1)


class Cancelled(Exception):
    """The pool was closed while a thread waited for a reservation."""


class BufferPool:
    """A bounded set of equal buffers, allocated as they are first needed.

    Who hands out work reserves a buffer for each piece of it, which may wait, and the thread that does the work takes
    one of those that are free, which never waits. So work may be handed out far ahead, but only as many buffers are
    ever touched as are full at once; and the one that was given back last, which caches still hold, is the next taken.

    Args:
        buffer_nbytes: size of each, in bytes.
        budget_nbytes: limit of all buffers together. Two are allowed whatever the budget: with one, encoding and
            writing would take turns.
        most: maximum number of buffers: beyond what keeps all threads busy, they only cause page faults.
        allocate: allocates one.

    Attributes:
        buffer_nbytes: size of each buffer.
        limit_nbytes: the most that all buffers take together.
    """

    def __init__(
        self,
        buffer_nbytes: int,
        budget_nbytes: int,
        most: int,
        allocate: Callable[[int], memoryview] = plain_allocate,
    ) -> None:
        self.buffer_nbytes = buffer_nbytes
        count = max(2, min(most, budget_nbytes // buffer_nbytes))
        self.limit_nbytes = count * buffer_nbytes
        self._allocate = allocate
        # one True for each buffer that is not reserved
        self._unreserved: SimpleQueue[bool] = SimpleQueue()
        for _ in range(count):
            self._unreserved.put(True)
        self._free: list[memoryview] = []

    def reserve(self) -> None:
        """Reserve a buffer; wait until there is one. Only for one thread.

        Raises:
            Cancelled: the pool was closed.
        """
        if not self._unreserved.get():
            raise Cancelled

    def take(self) -> memoryview:
        """Return a buffer that was reserved; any thread may."""
        try:
            return self._free.pop()
        except IndexError:
            return self._allocate(self.buffer_nbytes)

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer, or an empty one for a reservation that was not used; any thread may."""
        if buffer:
            self._free.append(buffer)
        self._unreserved.put(True)

    def close(self) -> None:
        """Wake the thread that waits in `reserve`."""
        self._unreserved.put(False)
