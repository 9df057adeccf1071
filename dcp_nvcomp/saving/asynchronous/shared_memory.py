"""Host memory that a process of our own can read too: what tensors are copied to while training waits.

Linux only: files without a name, which are gone with the last process that has them open.

Fresh memory is written by system calls: that takes as long as a copy of torch to fresh memory of its own, and half of
what a copy through the mapping would take, which has to zero each page and trap at each. Behind, the pages are mapped,
and from the next save on a copy goes through the mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from itertools import count

__all__ = ["SharedSegment", "SharedSegments", "is_available"]

_ROUND_NBYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class SharedSegment:
    """A piece of shared memory.

    Args:
        nbytes: its size.
        number: what both processes call it.
        descriptor: of the file; None to make one.

    Attributes:
        view: the memory.
        there_nbytes: how much of it, from the start, is there: a store to what is not may end the process.

    Raises:
        OSError: there can't be so much memory.
    """

    def __init__(self, nbytes: int, number: int, descriptor: int | None = None) -> None:
        self.nbytes, self.number, self.there_nbytes = nbytes, number, 0
        if descriptor is None:
            descriptor = os.memfd_create("dcp_nvcomp", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, nbytes)
            except BaseException:
                os.close(descriptor)
                raise
        self.descriptor = descriptor
        try:
            self.view = memoryview(mmap.mmap(descriptor, nbytes))
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes to memory that need not be there yet.

        Raises:
            OSError: there is not so much memory.
        """
        written = 0
        while written < len(data):
            written += os.pwrite(self.descriptor, data[written:], start + written)

    def map(self, nbytes: int) -> None:
        """Map memory that is there, so that the next copy to it meets no faults."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        # without it, on older kernels, the faults come later
        ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE
        )
        self.there_nbytes = max(self.there_nbytes, nbytes)

    def __del__(self) -> None:
        if "view" in self.__dict__:
            os.close(self.descriptor)


class SharedSegments:
    """Segments that are kept from save to save: fresh ones take as long to touch as to fill. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Iterator[int] = count()
        self._free: list[SharedSegment] = []

    @property
    def nbytes(self) -> int:
        """Size of the segments that are kept."""
        with self._lock:
            return sum(segment.nbytes for segment in self._free)

    def take(self, nbytes: int) -> SharedSegment:
        """Return a segment of at least `nbytes`: a free one that is not much larger, else a new one.

        Those that are too small, made for a smaller state, are let go.

        Raises:
            OSError: there can't be so much memory.
        """
        wanted = max(-(-nbytes // _ROUND_NBYTES), 1) * _ROUND_NBYTES
        with self._lock:
            fitting = [segment for segment in self._free if wanted <= segment.nbytes <= 2 * wanted]
            if fitting:
                segment = min(fitting, key=lambda segment: segment.nbytes)
                self._free.remove(segment)
                return segment
            self._free.clear()
            number = next(self._numbers)
        return SharedSegment(wanted, number)

    def give_back(self, segment: SharedSegment) -> None:
        """Keep a segment."""
        with self._lock:
            self._free.append(segment)

    def clear(self) -> None:
        """Free all that is kept."""
        with self._lock:
            self._free.clear()


def is_available() -> bool:
    """True if this system has such memory."""
    return hasattr(os, "memfd_create")
