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
import weakref
from collections.abc import Iterator
from itertools import count

_ROUND_NBYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class SharedSegment:
    """A piece of shared memory.

    Attributes:
        view: the memory.
        there_nbytes: how much of it, from the start, is there: a store to what is not may end the process.
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
            self._address, self.view = _mapped(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes to memory that need not be there yet."""
        written = 0
        while written < len(data):
            written += os.pwrite(self.descriptor, data[written:], start + written)

    def map(self, nbytes: int) -> None:
        """Map memory that is there, so that the next copy to it meets no faults."""
        _libc().madvise(self._address, nbytes, _MADV_POPULATE_WRITE)  # on older kernels the faults come later
        self.there_nbytes = max(self.there_nbytes, nbytes)

    def abandon(self) -> None:
        """Let go of it in a forked child, where it is not mapped."""
        os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        if "view" in self.__dict__ and self.descriptor >= 0:
            os.close(self.descriptor)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _mapped(descriptor: int, nbytes: int) -> tuple[int, memoryview]:
    """Map a file: in this process only, so that no forked worker, which may live long, holds the memory.

    Not with Python's mmap: that has a descriptor of its own, which a worker would inherit, and unmaps in a worker what
    is something else's there.
    """
    libc = _libc()
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    libc.madvise(address, nbytes, mmap.MADV_DONTFORK)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, os.getpid(), address, nbytes).atexit = False
    return address, memoryview(memory).cast("B")


def _unmap(pid: int, address: int, nbytes: int) -> None:
    if os.getpid() == pid:
        _libc().munmap(address, nbytes)


class SharedSegments:
    """Segments that are kept from save to save: fresh ones take as long to touch as to fill. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Iterator[int] = count()
        self._free: list[SharedSegment] = []
        self._made: weakref.WeakSet[SharedSegment] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Size of the segments that are kept."""
        with self._lock:
            return sum(segment.nbytes for segment in self._free)

    def take(self, nbytes: int) -> SharedSegment:
        """Return a segment of at least `nbytes`: a free one that is not much larger, else a new one.

        Those that are too small, made for a smaller state, are let go.
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
        segment = SharedSegment(wanted, number)
        with self._lock:
            self._made.add(segment)
        return segment

    def give_back(self, segment: SharedSegment) -> None:
        """Keep a segment."""
        with self._lock:
            self._free.append(segment)

    def clear(self) -> None:
        """Free all that is kept."""
        with self._lock:
            self._free.clear()

    def abandon(self) -> None:
        """Let go of all segments in a forked child; those that saves use too."""
        for segment in list(self._made):
            segment.abandon()


def is_available() -> bool:
    """True if this system has such memory."""
    return hasattr(os, "memfd_create")
