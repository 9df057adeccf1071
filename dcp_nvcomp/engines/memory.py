"""Host memory for encoded and decoded bytes."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np

from dcp_nvcomp.engines.notices import warn

_ALIGNMENT_NBYTES = 4096


def plain_allocate(nbytes: int) -> memoryview:
    """Host memory whose address is a multiple of 4096, for direct IO: the allocator's, which has some that was used."""
    raw = np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_NBYTES
    return raw[start : start + nbytes].data


def fresh_allocate(nbytes: int) -> memoryview:
    """The same of fresh memory, for much of it that is kept.

    Not from numpy, which asks for huge pages: then the kernel may move other memory about to make room for one, and
    fresh memory takes several times as long to touch.
    """
    whole = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(whole)[:nbytes]


def pinned_allocate(nbytes: int) -> memoryview:
    """Page-locked host memory, which a GPU copies to at full speed."""
    import torch

    view: memoryview = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    return view


class PinnedMemory:
    """Page-locked memory of one save or load, or pageable memory once there is none, for whatever reason."""

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._has_failed = False

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory. Any thread may call this; the first that fails warns."""
        if not self._has_failed:
            try:
                return self._allocate(nbytes)
            except Exception as error:
                with self._lock:
                    is_first, self._has_failed = not self._has_failed, True
                if is_first:
                    warn(
                        f"{nbytes} bytes of page-locked memory can't be had ({type(error).__name__}: {error}): copies "
                        "between GPU and host are slower. A lower host_memory_budget needs less of it."
                    )
        return plain_allocate(nbytes)
