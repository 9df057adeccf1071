"""Strips: consecutive blocks that follow each other in memory, which the CPU engine codes together.

boxes  --strips-->  Strip: some boxes in a line  --row_strip-->  the rows of an array that they are columns of

Boxes beside each other are columns of the rows that they share. Boxes that each are a run of memory, one behind the
other, are columns of a single row. So memory is passed through in its order, however narrow the boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import BLOCK_NBYTES
from dcp_nvcomp.format.blocks import Box

U8 = npt.NDArray[np.uint8]


class Strip(NamedTuple):
    """Consecutive boxes that follow each other along one dimension, or one box."""

    box: Box  # all of them together
    dim: int
    sizes: tuple[int, ...]  # the size of each along it


class RowStrip(NamedTuple):
    """The bytes of a strip in host memory."""

    rows: U8  # a matrix, in which the bytes of a row are next to each other
    widths: tuple[int, ...]  # how many bytes of each row belong to each box


def strips(boxes: Sequence[Box], element_nbytes: int) -> Iterator[Strip]:
    """Yield strips of at most 1 MiB, unless a single box has more."""
    start, most_elements = 0, BLOCK_NBYTES // element_nbytes
    while start < len(boxes):
        first, dim, stop = boxes[start], len(boxes[start].sizes) - 1, start + 1
        elements = first.elements
        while stop < len(boxes):
            along = _following(boxes[stop - 1], boxes[stop])
            elements += boxes[stop].elements
            if along is None or elements > most_elements or (stop > start + 1 and along != dim):
                break
            dim, stop = along, stop + 1
        yield _strip(boxes[start:stop], dim)
        start = stop


def alone(box: Box) -> Strip:
    """Return a strip of one box."""
    return Strip(box, len(box.sizes) - 1, box.sizes[-1:] or (1,))


def _following(box: Box, other: Box) -> int | None:
    """Return the dimension along which a box follows another; None if it does not."""
    offsets, sizes, next_offsets, next_sizes = box.offsets, box.sizes, other.offsets, other.sizes
    found = None
    for dim, offset in enumerate(offsets):
        if offset == next_offsets[dim] and sizes[dim] == next_sizes[dim]:
            continue
        if found is not None or offset + sizes[dim] != next_offsets[dim]:
            return None
        found = dim
    return found


def _strip(boxes: Sequence[Box], dim: int) -> Strip:
    if len(boxes) == 1:
        return alone(boxes[0])
    sizes = tuple(box.sizes[dim] for box in boxes)
    first = boxes[0].sizes
    return Strip(Box(boxes[0].offsets, (*first[:dim], sum(sizes), *first[dim + 1 :])), dim, sizes)


def row_strip(array: npt.NDArray[Any], strip: Strip) -> RowStrip | None:
    """Return the bytes of a strip."""
    part = array[strip.box.index]
    count, last = len(strip.sizes), part.ndim - 1
    if part.flags.c_contiguous and (count == 1 or strip.dim < last):
        if count == 1:
            return RowStrip(part.reshape(1, -1).view(np.uint8), (part.nbytes,))
        if any(size != 1 for size in part.shape[: strip.dim]):  # the boxes' bytes are interleaved
            return None
        each = part.nbytes // part.shape[strip.dim]
        return RowStrip(part.reshape(1, -1).view(np.uint8), tuple(each * size for size in strip.sizes))
    if last < 0 or part.strides[-1] != part.itemsize or strip.dim < last or any(size != 1 for size in part.shape[:-2]):
        return None
    rows = part.reshape(part.shape[-2:] if last else (1, -1)).view(np.uint8)
    return RowStrip(rows, tuple(size * part.itemsize for size in strip.sizes))
