"""An engine's device memory: one run of it, reserved once, from which every batch takes what it needs.

Memory that is taken from torch batch by batch stays reserved for the stream that used it, in as many sizes as there
were batches. One run is reserved once, and its size is known. All work of an engine is on one stream, so that memory
which is given back may be given out again at once.

    Arena.empty     a tensor, given back when the last reference to it is dropped
    Arena.take      memory for nvCOMP, which gives it back when it likes, on whatever thread the collector runs
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

# As cudaMalloc aligns at least; nvCOMP wants its scratch memory aligned to 256 at most.
ALIGNMENT_NBYTES: Final = 512
_LEAST_NBYTES: Final = 4096


class _Region:
    """A run of device memory and the gaps in it that are free, sorted."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        skipped = -memory.data_ptr() % ALIGNMENT_NBYTES
        self.gaps = [(skipped, memory.numel())]
        self.given_back: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free run, the first that is long enough; None if there is none."""
        while self.given_back:
            self._merge(*self.given_back.popleft())
        for at, (start, stop) in enumerate(self.gaps):
            if stop - start >= nbytes:
                self.gaps[at : at + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def _merge(self, start: int, stop: int) -> None:
        at = next((at for at, gap in enumerate(self.gaps) if gap[0] > start), len(self.gaps))
        if at < len(self.gaps) and self.gaps[at][0] == stop:
            stop = self.gaps.pop(at)[1]
        if at and self.gaps[at - 1][1] == start:
            start = self.gaps.pop(at - 1)[0]
            at -= 1
        self.gaps.insert(at, (start, stop))


class Piece:
    """Memory of an arena for as long as this object is held."""

    __slots__ = ("_region", "_start", "_stop", "ptr")

    def __init__(self, region: _Region, start: int, stop: int) -> None:
        self._region = region
        self._start = start
        self._stop = stop
        self.ptr = region.memory.data_ptr() + start

    def give_back(self) -> None:
        """Give it back; any thread may, and the garbage collector: this takes no lock, and only leaves a note."""
        self._region.given_back.append((self._start, self._stop))


class Arena:
    """Memory of one engine. Only `Piece.give_back` and `retry` may be called by several threads at once.

    What the device did not have is asked for again only after `retry`: a request that fails makes torch's allocator
    give back all that it keeps for others, and would be made for every batch.
    """

    def __init__(self, allocate: Callable[[int], Tensor], return_memory: Callable[[], None] = lambda: None) -> None:
        self._allocate = allocate
        self._return_memory = return_memory
        self._region: _Region | None = None
        self._limit_nbytes = _LEAST_NBYTES
        self._refused_nbytes = sys.maxsize

    @property
    def _reserved_nbytes(self) -> int:
        return 0 if self._region is None else self._region.memory.numel()

    @property
    def capacity_nbytes(self) -> int:
        """How much it holds at most: less than its limit if the device has no more, 0 if it has none."""
        if self._region is None:
            self._reserve(self._limit_nbytes)
        return self._reserved_nbytes

    def set_limit(self, nbytes: int) -> None:
        """Hold at most so much from now on; what differs now is given back, and reserved again when it is needed."""
        self._limit_nbytes = max(nbytes, _LEAST_NBYTES)
        if self._reserved_nbytes < self._limit_nbytes < self._refused_nbytes:
            self.release()
        self.shrink(self._limit_nbytes)

    def shrink(self, nbytes: int) -> None:
        """Give memory back if it is more than this."""
        if self._reserved_nbytes > max(nbytes, _LEAST_NBYTES):
            self.release()

    def retry(self) -> None:
        """Ask again for what the device did not have: another save or load begins."""
        self._refused_nbytes = sys.maxsize

    def grow(self, nbytes: int) -> None:
        """Make room for one batch that takes more than the limit, if the device has so much, until `settle`."""
        wanted_nbytes = _rounded(nbytes) + ALIGNMENT_NBYTES
        if self.capacity_nbytes < nbytes and wanted_nbytes < self._refused_nbytes:
            self.release()
            self._try(wanted_nbytes)

    def settle(self) -> None:
        """Give back what `grow` reserved beyond the limit."""
        self.shrink(self._limit_nbytes)

    def release(self) -> None:
        """Give all memory back that is not in use; what is in use follows when it no longer is."""
        if self._region is not None:
            self._region = None
            self._return_memory()

    def _reserve(self, nbytes: int) -> None:
        while nbytes >= _LEAST_NBYTES and self._region is None:
            self._try(nbytes)
            nbytes //= 2

    def _try(self, nbytes: int) -> None:
        if nbytes < self._refused_nbytes:
            try:
                self._region = _Region(self._allocate(nbytes))
            except (torch.OutOfMemoryError, MemoryError):
                self._refused_nbytes = nbytes

    def take(self, nbytes: int) -> Piece:
        """Return memory, its address a multiple of `ALIGNMENT_NBYTES`."""
        room = _rounded(max(nbytes, 1))
        capacity_nbytes = self.capacity_nbytes
        start = None if self._region is None else self._region.take(room)
        if start is None:
            raise torch.OutOfMemoryError(f"{nbytes} bytes are not left of the {capacity_nbytes} bytes of an engine.")
        assert self._region is not None
        return Piece(self._region, start, start + room)

    def empty(self, nbytes: int) -> Tensor:
        """Return memory as a uint8 tensor. Views of it do not keep it: hold the tensor itself while it is in use."""
        piece = self.take(nbytes)
        start = piece.ptr - piece._region.memory.data_ptr()
        tensor = piece._region.memory[start : start + nbytes]
        weakref.finalize(tensor, piece.give_back).atexit = False
        return tensor


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
