"""Memory beside which nothing can be accessed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

__all__ = ["GuardPages"]

_LIBC = ctypes.CDLL(None, use_errno=True)


class GuardPages:
    """Allocates memory between pages that end the process if a byte of them is read or written."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def allocate(self, nbytes: int, *, at_end: bool = True) -> np.ndarray:
        """Return memory that ends at such a page, or begins at one."""
        inner_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(-1, inner_nbytes + 2 * mmap.PAGESIZE)
        self._kept.append(mapped)
        everything = np.frombuffer(mapped, np.uint8)
        for start in (0, mmap.PAGESIZE + inner_nbytes):
            page = ctypes.c_void_p(everything.ctypes.data + start)
            assert _LIBC.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        start = mmap.PAGESIZE + (inner_nbytes - nbytes if at_end else 0)
        return everything[start : start + nbytes]
