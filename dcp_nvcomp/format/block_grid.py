"""Pure geometry: the blocks of a shard's box, those that a region needs, and runs of blocks in memory.

Boxes side by side are columns of the rows that they share. Boxes that each are a run of memory, one after the other,
are columns of a single row. So memory is passed through in its order, however narrow the boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import BLOCK_NBYTES

# Matrices as large as this are cut into boxes. In smaller ones the cost per block exceeds what a resharded load saves;
# so it does in boxes of half this size, which take an eighth longer to encode and to decode.
_BOXED_NBYTES = 1 << 20
_BOX_NBYTES, _MIN_BOXES = 256 << 10, 8
_MIN_HEIGHT = 8
# Minimum width of a box, that of larger matrices, and the maximum, unless the matrix has few rows.
_MIN_RUN_NBYTES, _LARGE_MIN_RUN_NBYTES, _LARGE_NBYTES = 1 << 10, 2 << 10, 4 << 20
_MAX_RUN_NBYTES = 4 << 10
_PARTS = 4

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Box:
    """A region of an array: `offsets` and `sizes`, one each per dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def index(self) -> Any:
        """The region as an index for a tensor or an array; ends in an ellipsis, so that a 0-d array stays an array."""
        slices = [slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True)]
        return (*slices, ...)

    def intersect(self, other: Box) -> Box | None:
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = (
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def contains(self, other: Box) -> bool:
        if self.offsets == other.offsets and self.sizes == other.sizes:
            return True
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            if b < a or b + n > a + m:
                return False
        return True

    def relative_to(self, origin: Sequence[int]) -> Box:
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)


def row_block_shape(shape: Sequence[int], element_nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> tuple[int, ...]:
    """Return blocks of whole rows, about `block_nbytes` together; of pieces of a row if a row is larger."""
    block = [max(size, 1) for size in shape]
    room = max(block_nbytes // element_nbytes, 1)
    for dim in range(len(block)):
        inner = math.prod(block[dim + 1 :])
        if inner > room:
            block[dim] = 1
            continue
        fits = max(room // inner, 1)
        if fits < block[dim]:
            block[dim] = _equal(block[dim], fits)
        break
    return tuple(block)


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a box of `shape`, numbered in C order of the grid."""

    shape: tuple[int, ...]
    block_shape: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-size // block) for size, block in zip(self.shape, self.block_shape, strict=True))

    @cached_property
    def block_count(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def _whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def box(self, index: int) -> Box:
        if self.block_count == 1:  # thousands of tensors have one block
            return self._whole
        offsets, sizes = list(self.shape), list(self.shape)
        for dim in range(len(sizes) - 1, -1, -1):
            block = self.block_shape[dim]
            if block >= sizes[dim]:
                offsets[dim] = 0
                continue
            index, position = divmod(index, self.counts[dim])
            offset = offsets[dim] = position * block
            sizes[dim] = min(block, sizes[dim] - offset)
        return Box(tuple(offsets), tuple(sizes))

    def block_elements(self) -> npt.NDArray[np.int64]:
        """Return the number of elements of each block, in order. Check `block_count` first: it allocates that many."""
        if self.block_count == 1:
            return np.array([math.prod(self.shape)], np.int64)
        elements = np.ones(1, np.int64)
        for size, block, count in zip(self.shape, self.block_shape, self.counts, strict=True):
            sizes = np.full(count, block, np.int64)
            if count:
                sizes[-1] = size - (count - 1) * block
            elements = np.multiply.outer(elements, sizes).ravel()
        return elements

    def overlapping(self, region: Box) -> Iterator[int]:
        """Yield the numbers of the blocks that share an element with `region`, in order."""
        if region.elements == 0 or self.block_count == 0:
            return
        if self.block_count == 1:
            yield 0
            return
        ranges = [
            range(offset // block, (offset + size - 1) // block + 1)
            for offset, size, block in zip(region.offsets, region.sizes, self.block_shape, strict=True)
        ]
        for position in product(*ranges):
            index = 0
            for at, count in zip(position, self.counts, strict=True):
                index = index * count + at
            yield index


@lru_cache(maxsize=1024)
def row_grid(shape: tuple[int, ...], element_nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> BlockGrid:
    """Return the grid of blocks of `row_block_shape`, one object for all shards of a shape."""
    return BlockGrid(shape, row_block_shape(shape, element_nbytes, block_nbytes))


def box_block_shape(shape: Sequence[int], element_nbytes: int) -> tuple[int, ...]:
    """Return blocks that are boxes of the last two dimensions if these are a large matrix, else `row_block_shape`.

    A box is a quarter of a row wide: less if that is more than 4 KiB, more if that is less than 1 KiB (from 4 MiB on,
    2 KiB). A row has a power of two of them, as ranks that hold columns are often as many. A matrix of few rows, or of
    short ones, has blocks of rows.
    """
    nbytes = math.prod(shape[-2:]) * element_nbytes
    if len(shape) < 2 or nbytes < _BOXED_NBYTES:
        return row_block_shape(shape, element_nbytes)
    rows, columns = shape[-2:]
    row_nbytes, min_run_nbytes = columns * element_nbytes, _MIN_RUN_NBYTES
    if nbytes >= _LARGE_NBYTES:
        min_run_nbytes = _LARGE_MIN_RUN_NBYTES
    if rows < _MIN_HEIGHT or row_nbytes < min_run_nbytes:
        return row_block_shape(shape, element_nbytes)
    box_nbytes = min(_BOX_NBYTES, nbytes // _MIN_BOXES)
    min_run_nbytes = max(min_run_nbytes, box_nbytes // rows)
    parts = 1
    while row_nbytes >= 2 * parts * min_run_nbytes and (parts < _PARTS or row_nbytes > parts * _MAX_RUN_NBYTES):
        parts *= 2
    width = -(-columns // parts)
    height = max(1, min(rows, box_nbytes // (width * element_nbytes)))
    return (*(1 for _ in shape[:-2]), _equal(rows, height), width)


def _equal(size: int, part: int) -> int:
    """Return the length of equal parts, as many as there are of `part`, rather than full ones and a small rest."""
    return -(-size // -(-size // part))


@lru_cache(maxsize=1024)
def box_grid(shape: tuple[int, ...], element_nbytes: int) -> BlockGrid:
    """Return the grid of blocks of `box_block_shape`, one object for all shards of a shape."""
    return BlockGrid(shape, box_block_shape(shape, element_nbytes))


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


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def element_span(sizes: Sequence[int], region: Box) -> tuple[int, int]:
    """Return the places of the first element of a region of a contiguous tensor, and after its last one."""
    strides = strides_of(sizes)
    first = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    last = sum((size - 1) * stride for size, stride in zip(region.sizes, strides, strict=True))
    return first, first + last + 1
