"""Host memory for encoded blocks: a pool of reused buffers, bounded by the user's budget.

An encoder takes a buffer, fills it, and hands it over; the thread that writes it gives it back. Whoever asks for a
buffer when all are out waits: that is how a slow sink holds back the encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from dcp_nvcomp.engines.memory import plain_allocate

__all__ = ["BufferPool", "Cancelled", "cuda_buffer_nbytes"]


# A block of 4 MiB, as ANS has them, with the padding of its slices, must fit.
_MIN_CUDA_BUFFER_NBYTES = 8 << 20
# Thousands of slices, which is what a large GPU needs to be busy.
_MAX_CUDA_BUFFER_NBYTES = 128 << 20


def cuda_buffer_nbytes(budget_nbytes: int, state_nbytes: int) -> int:
    """How large a buffer is whose content one batch of the CUDA engine makes.

    Args:
        budget_nbytes: what all buffers may take together.
        state_nbytes: how much there is to save: a small state too is encoded, copied and written at the same time.

    Returns:
        A power of two, as torch rounds page-locked memory up to one.
    """
    wanted = min(budget_nbytes // 8, state_nbytes // 4, _MAX_CUDA_BUFFER_NBYTES)
    return 1 << (max(wanted, _MIN_CUDA_BUFFER_NBYTES).bit_length() - 1)


class Cancelled(Exception):
    """The pool was closed while somebody waited for a buffer."""


class BufferPool:
    """A bounded set of equal buffers, allocated as they are first needed.

    Args:
        buffer_nbytes: size of each, in bytes.
        budget_nbytes: how much they may take together. At least two are allowed whatever the budget, as one alone
            would make encoding and writing take turns.
        most: never more than this many: beyond what keeps all threads busy, buffers only make page faults.
        allocate: where the memory comes from.

    Attributes:
        buffer_nbytes: size of each buffer.
        limit_nbytes: what all of them can take.
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
        """A free buffer; waits for one. Only for one thread.

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
