"""nvCOMP's own device memory: taken from the arena of the engine that it works for, and counted."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from dcp_nvcomp.engines.cuda.arena import Arena
from dcp_nvcomp.engines.cuda.support import load_nvcomp


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
        self._released: deque[tuple[int, int]] = deque()

    def attach(self, stream_handle: int, arena: Arena) -> None:
        """Take memory for this stream from an arena, as long as there is that."""
        self._arenas[stream_handle] = arena

    def __call__(self, nbytes: int, stream: Any) -> _Allocation:
        """Allocate, as nvCOMP asks for it."""
        handle = int(stream.ptr)
        arena = self._arenas.get(handle)
        held = self._take(max(nbytes, 1), stream) if arena is None else arena.take(nbytes)
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

    def reset_peak(self, stream_handle: int) -> int:
        """Restart `peak_nbytes` from what is held now, and return that."""
        with self._lock:
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


_INSTALLING = threading.Lock()


def installed_memory() -> NvcompMemory:
    """Return the one that nvCOMP has for the whole process, though several threads make engines at the same time."""
    with _INSTALLING:
        return _install()


@functools.cache
def _install() -> NvcompMemory:
    memory = NvcompMemory(_FromTorch)
    load_nvcomp().set_device_allocator(memory)
    return memory
