"""Host memory for encoded blocks: a pool of reused buffers, bounded by the user's budget.

An encoder takes a buffer, fills it, and hands it over; the thread that writes it gives it back. While all buffers are
out, `take` waits: that is how a slow sink holds back the encoders.
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
    """The pool was closed while a thread waited for a buffer."""


class BufferPool:
    """A bounded set of equal buffers, allocated as they are first needed.

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
        self._unallocated = max(2, min(most, budget_nbytes // buffer_nbytes))
        self.limit_nbytes = self._unallocated * buffer_nbytes
        self._allocate = allocate
        self._free: SimpleQueue[memoryview | None] = SimpleQueue()

    def take(self) -> memoryview:
        """Return a free buffer; wait for one if necessary. Only for one thread.

        Raises:
            Cancelled: the pool was closed.
        """
        if self._unallocated and self._free.empty():
            self._unallocated -= 1
            return self._allocate(self.buffer_nbytes)
        buffer = self._free.get()
        if buffer is None:
            raise Cancelled
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer; any thread may."""
        self._free.put(buffer)

    def close(self) -> None:
        """Wake the thread that waits in `take`."""
        self._free.put(None)
