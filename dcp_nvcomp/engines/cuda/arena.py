"""An engine's device memory: one run of it, reserved once, from which every batch takes what it needs.

Memory that is taken from torch batch by batch stays reserved for the stream that used it, in as many sizes as there
were batches. One run is reserved once, and its size is known. All work of an engine is on one stream, so that memory
which is given back may be given out again at once; what is copied to the host beside it is held until that has ended.

    Arena.empty     a tensor, given back when the last reference to it is dropped
    Arena.take_kept memory for nvCOMP (`NvcompMemory`), which gives it back when it likes, on whatever thread the
                    collector runs
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dcp_nvcomp.engines.cuda.batches import fitting
from dcp_nvcomp.engines.cuda.support import load_nvcomp

# As cudaMalloc aligns at least; nvCOMP wants its scratch memory aligned to 256 at most.
ALIGNMENT_NBYTES: Final = 512
_LEAST_NBYTES: Final = 4096
# Less stays in torch's cache when it is given up: torch can only return all that it has cached, which is training's.
_LEAST_RETURNED_NBYTES: Final = 64 << 20
# One part in so many may be kept from batch to batch: nvCOMP's codecs keep the scratch memory of their largest batch.
_KEPT_SHARE: Final = 8

_INSTALLING = threading.Lock()


class _Region:
    """A run of device memory and the gaps in it that are free, sorted."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        skipped = -memory.data_ptr() % ALIGNMENT_NBYTES
        # whole units only, so that what is taken from the end is aligned too
        whole = max(memory.numel() - skipped, 0) // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES
        self.gaps = [(skipped, skipped + whole)] if whole else []
        self._whole_nbytes = whole
        self.given_back: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free run, the first that is long enough; None if there is none."""
        self._settle()
        for at, (start, stop) in enumerate(self.gaps):
            if stop - start >= nbytes:
                self.gaps[at : at + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def take_last(self, nbytes: int) -> int | None:
        """Return the offset of a free run, the last that is long enough; None if there is none."""
        self._settle()
        for at, (start, stop) in reversed([*enumerate(self.gaps)]):
            if stop - start >= nbytes:
                self.gaps[at : at + 1] = [(start, stop - nbytes)] if stop - start > nbytes else []
                return stop - nbytes
        return None

    def used_nbytes(self) -> int:
        self._settle()
        return self._whole_nbytes - sum(stop - start for start, stop in self.gaps)

    def _settle(self) -> None:
        while self.given_back:
            self._merge(*self.given_back.popleft())

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

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        return_memory: Callable[[], None] = lambda: None,
        free_nbytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._allocate = allocate
        self._return_memory = return_memory
        self._free_nbytes = free_nbytes  # what the device has left; None if that is not known
        self._region: _Region | None = None
        self._limit_nbytes = _LEAST_NBYTES
        self._refused_nbytes = sys.maxsize
        self._is_short = False  # True if what is held is less than was asked for
        self._lent_nbytes = 0
        self._keeper: Callable[[], Callable[[], None] | None] = lambda: None

    def set_keeper(self, forget: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Say what frees memory that is kept from batch to batch; called between batches only."""
        self._keeper = forget

    @property
    def _reserved_nbytes(self) -> int:
        return 0 if self._region is None else self._region.memory.numel()

    @property
    def capacity_nbytes(self) -> int:
        """How much it holds at most: less than its limit if the device has no more, 0 if it has none."""
        if self._region is None:
            self._reserve(self._limit_nbytes)
        return self._reserved_nbytes

    def _kept_nbytes(self) -> int:
        """Return how much is in use between batches, but for what is lent; if that is much, try to free it before."""
        kept = self._used_nbytes() - self._lent_nbytes
        if kept > min(self._reserved_nbytes, self._limit_nbytes) // _KEPT_SHARE:
            self._forget()
            kept = self._used_nbytes() - self._lent_nbytes
        return max(kept, 0)

    def _used_nbytes(self) -> int:
        return 0 if self._region is None else self._region.used_nbytes()

    def _forget(self) -> None:
        forget = self._keeper()
        if forget is not None:
            forget()

    def reserve(self) -> None:
        """Reserve what the limit allows, or what there is of it."""
        try:
            nbytes = self.capacity_nbytes
        except Exception as error:
            raise torch.OutOfMemoryError(f"no memory can be reserved ({type(error).__name__}: {error})") from error
        if nbytes == 0:
            raise torch.OutOfMemoryError("the device has no memory left for an engine")

    def set_limit(self, nbytes: int) -> None:
        """Hold at most so much from now on; what differs now is given back, and reserved again when it is needed."""
        self._limit_nbytes = max(nbytes, _LEAST_NBYTES)
        if self._reserved_nbytes < self._limit_nbytes < self._refused_nbytes and self._has_more():
            self.release()
        self.shrink(self._limit_nbytes)

    def _has_more(self) -> bool:
        """Return False if there is no use in giving back what is held, for more of it."""
        free_nbytes = self._free_nbytes() if self._is_short else None
        if free_nbytes is None or free_nbytes >= self._limit_nbytes - self._reserved_nbytes:
            return True
        self._refused_nbytes = self._limit_nbytes
        return False

    def shrink(self, nbytes: int) -> None:
        """Give memory back if it is more than this."""
        if self._reserved_nbytes > max(nbytes, _LEAST_NBYTES):
            self.release()

    def retry(self) -> None:
        """Ask again for what the device did not have: another save or load begins."""
        self._refused_nbytes = sys.maxsize

    def grow(self, nbytes: int) -> None:
        """Make room for one batch that takes more than the limit, if the device has so much, until `settle`."""
        nbytes += self._lent_nbytes
        wanted_nbytes = _rounded(nbytes) + ALIGNMENT_NBYTES
        if self.capacity_nbytes - self._kept_nbytes() < nbytes:
            self._forget()
        if self.capacity_nbytes - self._kept_nbytes() < nbytes and wanted_nbytes < self._refused_nbytes:
            self.release()
            self._try(wanted_nbytes)

    def fitting(self, costs: Sequence[int], start: int, most: int) -> int:
        """Return how many blocks make the next batch, and have room for them."""
        room_nbytes = min(self.capacity_nbytes, self._limit_nbytes) - self._lent_nbytes - self._kept_nbytes()
        count = fitting(costs, start, most, room_nbytes)
        if count == 1:
            self.grow(costs[start])
        return count

    def take_scratch(self, nbytes: int, costs: Sequence[int]) -> Tensor:
        """Return memory for decoded blocks, beside which each can be decoded."""
        need_nbytes = nbytes + max(costs)
        if len(costs) == 1:
            self.grow(need_nbytes)
        elif need_nbytes > min(self.capacity_nbytes, self._limit_nbytes) - self._kept_nbytes():
            raise torch.OutOfMemoryError(f"an engine does not have {need_nbytes} bytes")
        return self.empty(nbytes)

    @contextmanager
    def lending(self, scratch: Tensor) -> Iterator[None]:
        """Limit batches meanwhile to what this leaves."""
        self._lent_nbytes = scratch.numel()
        try:
            yield
        finally:
            self._lent_nbytes = 0

    def settle(self, most_nbytes: int | None = None) -> None:
        """Give back what is held beyond the limit, or beyond `most_nbytes`."""
        # what can't be given back is no reason to fail: if the GPU is broken, the next batch finds out
        with suppress(Exception):
            self.shrink(self._limit_nbytes if most_nbytes is None else most_nbytes)

    def release(self) -> None:
        """Give all memory back that is not in use; what is in use follows when it no longer is."""
        if self._region is not None:
            self._forget()
            reserved_nbytes, self._region, self._is_short = self._reserved_nbytes, None, False
            if reserved_nbytes >= _LEAST_RETURNED_NBYTES:
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
                self._refused_nbytes, self._is_short = nbytes, True

    def take(self, nbytes: int) -> Piece:
        """Return memory, its address a multiple of `ALIGNMENT_NBYTES`."""
        return self._take(nbytes, _Region.take)

    def take_kept(self, nbytes: int) -> Piece:
        """Return memory that may be kept from batch to batch: at the end, so that what is free stays in one run."""
        return self._take(nbytes, _Region.take_last)

    def _take(self, nbytes: int, take: Callable[[_Region, int], int | None]) -> Piece:
        room = _rounded(max(nbytes, 1))
        capacity_nbytes = self.capacity_nbytes
        start = None if self._region is None else take(self._region, room)
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


class Held(Protocol):
    """Device memory that is held."""

    ptr: int

    def give_back(self) -> None:
        """Give it back. Takes no lock: the garbage collector may call it anywhere."""


class NvcompMemory:
    """nvCOMP's device memory: of an engine's stream from its arena, else from torch's caching allocator.

    Never from cudaMalloc and cudaFree, which synchronise the device.

    Counts what nvCOMP holds for each stream: nothing else reports how much scratch memory a coder takes. Any thread
    may allocate. Memory is given back wherever the garbage collector happens to run, perhaps on a thread that is inside
    one of these methods: so `release` takes no lock, it leaves a note that the next of them reads.
    """

    def __init__(self, take: Callable[[int, Any], Held]) -> None:
        self._take = take
        # not for longer than they live: a new stream may get the handle of one that is gone
        self._arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._held_nbytes: dict[int, int] = {}
        self._peak_nbytes: dict[int, int] = {}
        self._refused_nbytes: dict[int, int] = {}
        self._released: deque[tuple[int, int]] = deque()

    def attach(self, stream_handle: int, arena: Arena) -> None:
        """Take memory for this stream from an arena, as long as there is that."""
        self._arenas[stream_handle] = arena

    def __call__(self, nbytes: int, stream: Any) -> _Allocation:
        """Allocate, as nvCOMP asks for it."""
        handle = int(stream.ptr)
        arena = self._arenas.get(handle)
        try:
            held = self._take(max(nbytes, 1), stream) if arena is None else arena.take_kept(nbytes)
        except torch.OutOfMemoryError:
            self._refused_nbytes[handle] = nbytes
            raise
        allocation = _Allocation(self, held, nbytes, handle)
        with self._lock:
            held_nbytes = self._settled(handle) + nbytes
            self._held_nbytes[handle] = held_nbytes
            self._peak_nbytes[handle] = max(self._peak_nbytes.get(handle, 0), held_nbytes)
        return allocation

    def _settled(self, stream_handle: int) -> int:
        """Return the bytes held for a stream, after reading all notes."""
        while self._released:
            stream, nbytes = self._released.popleft()
            self._held_nbytes[stream] = self._held_nbytes.get(stream, 0) - nbytes
        return self._held_nbytes.get(stream_handle, 0)

    def peak_nbytes(self, stream_handle: int) -> int:
        """Return the most that was held for a stream since `reset_peak`."""
        with self._lock:
            return self._peak_nbytes.get(stream_handle, 0)

    def refused_nbytes(self, stream_handle: int) -> int:
        """Return what was asked for last in vain for a stream since `reset_peak`; 0 if nothing was."""
        return self._refused_nbytes.get(stream_handle, 0)

    def reset_peak(self, stream_handle: int) -> int:
        """Restart `peak_nbytes` from what is held now, and return that."""
        with self._lock:
            self._refused_nbytes.pop(stream_handle, None)
            held_nbytes = self._peak_nbytes[stream_handle] = self._settled(stream_handle)
            return held_nbytes

    def release(self, allocation: _Allocation) -> None:
        """Called by an allocation when nvCOMP drops it."""
        self._released.append((allocation.stream, allocation.nbytes))
        allocation.held.give_back()


class _Allocation:
    """nvCOMP reads `ptr`, and gives the memory back by dropping the object."""

    def __init__(self, memory: NvcompMemory, held: Held, nbytes: int, stream: int) -> None:
        self._memory = memory
        self.held = held
        self.ptr = held.ptr
        self.nbytes = nbytes
        self.stream = stream

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._memory.release(self)


class _FromTorch:
    """Memory of torch's caching allocator."""

    def __init__(self, nbytes: int, stream: Any) -> None:
        self.ptr = int(torch.cuda.caching_allocator_alloc(nbytes, device=stream.device, stream=stream.ptr))

    def give_back(self) -> None:
        torch.cuda.caching_allocator_delete(self.ptr)  # type: ignore[no-untyped-call]


def installed_memory() -> NvcompMemory:
    """Return the one that nvCOMP has for the whole process, though several threads make engines at the same time."""
    with _INSTALLING:
        return _install()


@functools.cache
def _install() -> NvcompMemory:
    memory, nvcomp = NvcompMemory(_FromTorch), load_nvcomp()
    nvcomp.set_device_allocator(memory)
    # nvCOMP's module aborts the process if it drops the last reference to an allocator while Python ends
    atexit.register(nvcomp.set_device_allocator)
    return memory
