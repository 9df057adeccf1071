"""Geometry of blocks against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs.base import BLOCK_NBYTES
from dcp_nvcomp.format.block_grid import (
    BlockGrid,
    Box,
    Strip,
    alone,
    box_block_shape,
    box_grid,
    row_block_shape,
    row_strip,
    strips,
)
from tests.effort import examples

DRAWN = settings(max_examples=examples(200), deadline=None)


@st.composite
def grids(draw: st.DrawFn, least: int = 0) -> BlockGrid:
    shape = draw(st.lists(st.integers(least, 7), max_size=4))
    return BlockGrid(tuple(shape), tuple(draw(st.integers(1, size + 2)) for size in shape))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


def owners(grid: BlockGrid) -> np.ndarray:
    """The number of the block that each element lies in, -1 outside of all; fails where two blocks overlap."""
    owner = np.full(grid.shape, -1)
    for index in range(grid.block_count):
        where = grid.box(index).index
        assert np.all(owner[where] == -1)
        owner[where] = index
    return owner


@DRAWN
@given(grids())
def test_the_blocks_cover_every_element_once(grid: BlockGrid) -> None:
    owner = owners(grid)
    assert not np.any(owner == -1)
    counts = [int(np.sum(owner == index)) for index in range(grid.block_count)]
    assert counts == grid.block_elements().tolist() == [grid.box(index).elements for index in range(grid.block_count)]
    assert grid.block_count == (len(counts) if math.prod(grid.shape) else 0)


@DRAWN
@given(grids())
def test_blocks_are_numbered_in_c_order(grid: BlockGrid) -> None:
    origins = [grid.box(index).offsets for index in range(grid.block_count)]
    assert origins == sorted(origins)
    assert all(at % step == 0 for origin in origins for at, step in zip(origin, grid.block_shape, strict=True))


@DRAWN
@given(st.data())
def test_overlapping(data: st.DataObject) -> None:
    grid = data.draw(grids())
    region = data.draw(boxes(grid.shape))
    needed = sorted(set(owners(grid)[region.index].ravel().tolist()))
    assert list(grid.overlapping(region)) == needed


@DRAWN
@given(st.data())
def test_intersect(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    first, second = data.draw(boxes(shape)), data.draw(boxes(shape))
    marks = np.zeros((2, *shape), bool)
    marks[(0, *first.index)] = True
    marks[(1, *second.index)] = True
    both = first.intersect(second)
    assert both == second.intersect(first)
    if both is None:
        assert not np.any(marks.all(axis=0))
    else:
        assert both.elements == np.sum(marks.all(axis=0))
        assert np.all(marks.all(axis=0)[both.index])
        assert both.relative_to(first.offsets).offsets == tuple(
            a - b for a, b in zip(both.offsets, first.offsets, strict=True)
        )


@DRAWN
@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 5000), st.integers(0, 1 << 40)), max_size=5),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 16, 1000, BLOCK_NBYTES]),
)
def test_row_block_shape(shape: list[int], element_nbytes: int, block_nbytes: int) -> None:
    block = row_block_shape(shape, element_nbytes, block_nbytes)
    assert len(block) == len(shape)
    assert all(1 <= size <= max(whole, 1) for size, whole in zip(block, shape, strict=True))
    assert math.prod(block) * element_nbytes <= max(block_nbytes, element_nbytes)
    # ones, then at most one dimension that is cut, then whole dimensions: the block is one run of memory
    cut = [dim for dim, (size, whole) in enumerate(zip(block, shape, strict=True)) if size < whole]
    assert all(block[dim] == 1 for dim in range(max(cut, default=0)))
    if cut and math.prod(shape):
        # never less than half of what fits
        room = block_nbytes // element_nbytes
        grown = math.prod(block) // block[cut[-1]] * min(2 * block[cut[-1]], shape[cut[-1]])
        assert grown * 2 > room or room == 0


@pytest.mark.parametrize(
    ("shape", "element_nbytes", "block"),
    [
        ((), 8, ()),
        ((0,), 4, (1,)),
        ((1 << 20,), 1, (1 << 20,)),
        ((3, 1 << 19), 2, (1, 1 << 19)),
        ((8192, 4096), 2, (128, 4096)),
        ((3, 5, 1 << 22), 4, (1, 1, 1 << 18)),
    ],
)
def test_row_block_shape_by_example(shape: tuple[int, ...], element_nbytes: int, block: tuple[int, ...]) -> None:
    assert row_block_shape(shape, element_nbytes) == block


def test_overlapping_takes_only_what_is_asked_for() -> None:
    grid = BlockGrid((1 << 40, 1 << 20), (1, 1 << 20))
    assert list(grid.overlapping(Box((1 << 39, 5), (2, 1)))) == [1 << 39, (1 << 39) + 1]
    assert grid.box(1 << 39) == Box((1 << 39, 0), (1, 1 << 20))


@DRAWN
@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 20000)), max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_box_block_shape(shape: list[int], element_nbytes: int) -> None:
    block = box_block_shape(shape, element_nbytes)
    if block == row_block_shape(shape, element_nbytes):
        return
    # a box of the last two dimensions
    assert len(block) == len(shape)
    assert all(size == 1 for size in block[:-2])
    (rows, columns), (height, width) = shape[-2:], block[-2:]
    assert math.prod(shape[-2:]) * element_nbytes >= 1 << 20
    assert 1 <= height <= min(rows, 256)
    assert 1 <= width <= columns
    assert math.prod(block) * element_nbytes <= max(256 << 10, width * element_nbytes)
    assert math.prod(block) * element_nbytes >= 32 << 10
    parts = -(-columns // width)
    assert parts & (parts - 1) == 0 or columns % width, "a power of two, but for columns that are not one of them"


@pytest.mark.parametrize(
    ("shape", "element_nbytes", "block"),
    [
        ((1024, 4096), 4, (64, 1024)),  # shards of a square matrix of 64 MiB
        ((2048, 2048), 4, (128, 512)),
        ((4096, 1024), 4, (128, 512)),
        ((512, 2048), 4, (128, 512)),  # of one of 16 MiB
        ((1024, 1024), 4, (128, 512)),
        ((256, 1024), 4, (128, 256)),  # of one of 4 MiB
        ((8192, 28672), 2, (73, 1792)),
        ((16, 4096, 1024), 4, (1, 128, 512)),  # experts
        ((1536, 384), 4, (154, 384)),  # as many boxes as of a smaller one, so larger boxes
        ((255, 1024), 4, (255, 1024)),  # less than 1 MiB
        ((1 << 20, 64), 4, (4096, 64)),  # narrow
        ((4, 1 << 20), 4, (1, 1 << 18)),  # of low rank
        ((512, 512, 3, 3), 4, (52, 512, 3, 3)),
    ],
)
def test_box_block_shape_by_example(shape: tuple[int, ...], element_nbytes: int, block: tuple[int, ...]) -> None:
    assert box_block_shape(shape, element_nbytes) == block


def shares(size: int, ranks: int) -> list[tuple[int, int]]:
    """What DTensor gives to each rank."""
    part = -(-size // ranks)
    return [(rank * part, min(size, (rank + 1) * part)) for rank in range(ranks)]


def placed(size: int, rows: int, columns: int) -> list[Box]:
    """The shards of a square matrix."""
    return [
        Box((top, left), (bottom - top, right - left))
        for top, bottom in shares(size, rows)
        for left, right in shares(size, columns)
    ]


@pytest.mark.parametrize(("size", "limit"), [(4096, 1.15), (2048, 1.3), (1024, 1.5)])
@pytest.mark.parametrize(
    ("saved", "loaded"), [((4, 1), (1, 4)), ((1, 4), (3, 1)), ((2, 2), (3, 1)), ((4, 1), (3, 1)), ((4, 1), (2, 1))]
)
def test_a_load_of_other_shards_reads_little_more(
    size: int, limit: float, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    """Square matrices of 64, 16 and 4 MiB."""
    for wanted in placed(size, *loaded):
        fetched = 0
        for shard in placed(size, *saved):
            common = wanted.intersect(shard)
            if common is not None:
                grid = BlockGrid(shard.sizes, box_block_shape(shard.sizes, 4))
                fetched += sum(grid.box(at).elements for at in grid.overlapping(common.relative_to(shard.offsets)))
        assert fetched <= limit * wanted.elements


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    """An array, perhaps a part of a larger one, or with its dimensions in another order in memory."""
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.int32, np.int64]))
    is_run = draw(st.booleans())
    order = range(len(shape)) if is_run else draw(st.permutations(range(len(shape))))
    margins = [0 if is_run else draw(st.integers(0, 2)) for _ in shape]
    memory = np.arange(np.prod([shape[dim] + margins[dim] for dim in order], dtype=int)).astype(dtype)
    whole = memory.reshape([shape[dim] + margins[dim] for dim in order]).transpose(np.argsort(order))
    return whole[(*(slice(margin, None) for margin in margins), ...)]


def boxes_of(found: Strip) -> list[Box]:
    """The boxes of a strip."""
    if found.box.sizes == ():
        return [found.box]
    out, offset = [], found.box.offsets[found.dim]
    for size in found.sizes:
        offsets, sizes = list(found.box.offsets), list(found.box.sizes)
        offsets[found.dim], sizes[found.dim] = offset, size
        out.append(Box(tuple(offsets), tuple(sizes)))
        offset += size
    return out


def check_rows(array: np.ndarray, found: Strip) -> bool:
    """Check the bytes of a strip; return True if there are rows."""
    taken = row_strip(array, found)
    if taken is None:
        return False
    assert sum(taken.widths) == taken.rows.shape[1]
    assert np.shares_memory(taken.rows, array)
    start = 0
    for box, width in zip(boxes_of(found), taken.widths, strict=True):
        assert taken.rows[:, start : start + width].tobytes() == array[box.index].tobytes()
        start += width
    return True


@DRAWN
@given(st.data())
def test_strips_are_all_boxes_in_order(data: st.DataObject) -> None:
    grid = data.draw(grids(1))
    boxes = [grid.box(number) for number in range(grid.block_count)]
    if data.draw(st.booleans()):
        boxes = [box for box in boxes if data.draw(st.integers(0, 5))]
    found = list(strips(boxes, 1))
    assert [box for strip in found for box in boxes_of(strip)] == boxes
    array = data.draw(arrays(grid.shape))
    for strip in found:
        check_rows(array, strip)


@DRAWN
@given(st.data())
def test_what_is_contiguous_has_rows(data: st.DataObject) -> None:
    grid = data.draw(grids(1))
    array = np.ascontiguousarray(data.draw(arrays(grid.shape))).reshape(grid.shape)
    for number in range(grid.block_count):
        box = grid.box(number)
        is_matrix = all(size == 1 for size in box.sizes[:-2])
        assert check_rows(array, alone(box)) or not (is_matrix or array[box.index].flags.c_contiguous)


def test_a_strip_is_at_most_as_long_as_a_block() -> None:
    grid = box_grid((512, 4096), 4)
    boxes = [grid.box(number) for number in range(grid.block_count)]
    assert [strip.box.sizes for strip in strips(boxes, 4)] == [(64, 4096)] * 8
    assert all(strip.box.elements * 4 <= BLOCK_NBYTES for strip in strips(boxes, 4))
    # one below the other, as rows are as short
    tall = box_grid((2048, 512), 4)
    boxes = [tall.box(number) for number in range(tall.block_count)]
    assert [(strip.dim, strip.sizes) for strip in strips(boxes, 4)] == [(0, (128,) * 4)] * 4
    large = [Box((0,), (BLOCK_NBYTES,)), Box((BLOCK_NBYTES,), (BLOCK_NBYTES,))]
    assert [strip.sizes for strip in strips(large, 4)] == [(BLOCK_NBYTES,)] * 2


def test_strips_take_a_turn_with_the_grid() -> None:
    """The last box of one row of boxes and the first of the next are no strip."""
    grid = BlockGrid((4, 6), (2, 3))
    boxes = [grid.box(number) for number in range(grid.block_count)]
    assert [strip.box for strip in strips(boxes, 1)] == [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]
    assert [strip.sizes for strip in strips(boxes[1:], 1)] == [(3,), (3, 3)]


def test_boxes_whose_bytes_are_interleaved_are_no_row() -> None:
    """Each of two dimensions of more than one element goes on in the other's next."""
    array = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    grid = BlockGrid((2, 4, 3), (2, 2, 3))
    (found,) = strips([grid.box(0), grid.box(1)], 1)
    assert found.sizes == (2, 2)
    assert row_strip(array, found) is None
    assert row_strip(array[:1], Strip(Box((0, 0, 0), (1, 4, 3)), 1, (2, 2))) is not None
