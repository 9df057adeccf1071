"""Host memory that a process of our own can read too, and the copy of what a rank saves in one segment of it.

Linux only: files without a name, which are gone with the last process that has them open. Fresh memory is written by
system calls, which takes half of what a copy through a fresh mapping would; from the next save on it is mapped.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.engines.tensors import is_transparent, without_lazy_bits

_ROUND_NBYTES = 2 << 20
_ALIGNMENT_NBYTES = 64
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class SharedSegment:
    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        self.there_nbytes = 0  # from the start: a store to memory that is not there may end the process
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
        self._free: list[SharedSegment] = []
        self._made: weakref.WeakSet[SharedSegment] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(segment.nbytes for segment in self._free)

    def take(self, nbytes: int) -> SharedSegment:
        """Return a free segment that is not much larger than `nbytes`, else a new one; smaller ones are let go."""
        wanted = max(-(-nbytes // _ROUND_NBYTES), 1) * _ROUND_NBYTES
        with self._lock:
            fitting = [segment for segment in self._free if wanted <= segment.nbytes <= 2 * wanted]
            if fitting:
                segment = min(fitting, key=lambda segment: segment.nbytes)
                self._free.remove(segment)
                return segment
            self._free.clear()
        segment = SharedSegment(wanted)
        with self._lock:
            self._made.add(segment)
        return segment

    def give_back(self, segment: SharedSegment) -> None:
        with self._lock:
            self._free.append(segment)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()

    def abandon(self) -> None:
        """Let go of all segments in a forked child; those that saves use too."""
        for segment in list(self._made):
            segment.abandon()


def is_available() -> bool:
    return hasattr(os, "memfd_create")


class Place(NamedTuple):
    """Where the data of one item is in its segment; `dtype` is None if it is bytes."""

    start: int
    nbytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


def can_copy(value: Any) -> bool:
    """True if bytes in host memory can stand for it: not for a tensor on a device, or one that hides its storage."""
    return isinstance(value, io.BytesIO) or (value.device.type == "cpu" and is_transparent(value))


def room_nbytes(sizes: Iterable[int]) -> int:
    """Return how much room values of these sizes take, one after the other."""
    return sum(-(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES for nbytes in sizes)


def copied(values: Iterable[Any], segment: SharedSegment, limit_nbytes: int) -> list[Place] | None:
    """Copy values one after the other, each before the next is asked for."""
    places, end = list[Place](), 0
    memory = segment.view
    with torch.no_grad():
        for value in values:
            if not can_copy(value):
                return None
            if isinstance(value, io.BytesIO):
                place = Place(end, value.getbuffer().nbytes)
            else:
                place = Place(end, value.numel() * value.element_size(), value.dtype, tuple(value.shape))
            end = place.start + room_nbytes([place.nbytes])
            if end > limit_nbytes:
                return None
            _copy(value, place, segment, memory)
            places.append(place)
    return places


def _copy(value: Any, place: Place, segment: SharedSegment, memory: memoryview) -> None:
    if not place.nbytes:
        return
    if place.dtype is None:
        segment.write(place.start, value.getbuffer())
    elif place.start + place.nbytes <= segment.there_nbytes:
        _tensor_at(place, place.dtype, memory).copy_(value)
    else:
        segment.write(place.start, _bytes_of(value))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = without_lazy_bits(tensor).contiguous().reshape(-1)
    array: npt.NDArray[np.uint8] = plain.view(torch.uint8).numpy()
    return array.data


def value_at(place: Place, memory: memoryview) -> torch.Tensor | io.BytesIO:
    if place.dtype is None:
        return io.BytesIO(memory[place.start : place.start + place.nbytes])
    if not place.nbytes:
        return torch.empty(place.shape, dtype=place.dtype)
    return _tensor_at(place, place.dtype, memory)


def resolver(
    items: Sequence[WriteItem], places: Sequence[Place], memory: memoryview
) -> Callable[[WriteItem], torch.Tensor | io.BytesIO]:
    """Return a function that finds the copied value of an item, which must be one of these very objects."""
    place_of = {id(item): place for item, place in zip(items, places, strict=True)}
    return lambda item: value_at(place_of[id(item)], memory)


def _tensor_at(place: Place, dtype: torch.dtype, memory: memoryview) -> torch.Tensor:
    count = place.nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place.start).view(place.shape)
