"""Host memory for encoded blocks: a pool of reused buffers, bounded by the user's budget.

An encoder takes a buffer, fills it, and hands it over; the thread that writes it gives it back. Whoever asks for a
buffer when all are out waits: that is how a slow sink holds back the encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

__all__ = ["BufferPool", "Cancelled", "pinned_allocate", "plain_allocate"]

_ALIGNMENT_NBYTES = 4096


class Cancelled(Exception):
    """The pool was closed while somebody waited for a buffer."""


def plain_allocate(nbytes: int) -> memoryview:
    """Host memory whose address is a multiple of 4096, for direct IO."""
    raw = np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_NBYTES
    return raw[start : start + nbytes].data


def pinned_allocate(nbytes: int) -> memoryview:
    """Page-locked host memory, which a GPU copies to at full speed."""
    import torch

    view: memoryview = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    return view


class BufferPool:
    """A bounded set of equal buffers, allocated as they are first needed.

    Args:
        buffer_nbytes: size of each, in bytes.
        budget_nbytes: how much they may take together. At least two are allowed whatever the budget, as one alone
            would make encoding and writing take turns.
        most: never more than this many: beyond what keeps all threads busy, buffers only make page faults.
        allocate: where the memory comes from.
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
