"""A copy of what a rank saves, in one segment of shared memory: as long as it takes, training waits."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.engines.tensors import is_transparent, without_lazy_bits
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegment

_ALIGNMENT_NBYTES = 64


class Place(NamedTuple):
    """Where the data of one item is.

    Attributes:
        start: its first byte in the segment.
        nbytes: its size.
        dtype: of the tensor; None if it is bytes.
        shape: of the tensor.
    """

    start: int
    nbytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


def can_copy(value: Any) -> bool:
    """True if bytes in host memory can stand for it: not for a tensor on a device, or one that hides its storage."""
    return isinstance(value, io.BytesIO) or (value.device.type == "cpu" and is_transparent(value))


def room_nbytes(sizes: Iterable[int]) -> int:
    """Return how much room values of these sizes take, one behind the other."""
    return sum(-(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES for nbytes in sizes)


def copied(values: Iterable[Any], segment: SharedSegment, limit_nbytes: int) -> list[Place] | None:
    """Copy values one behind the other, each before the next is asked for."""
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
    """Return a copied value: a tensor in the memory, or the bytes."""
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
