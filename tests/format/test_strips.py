"""Strips against brute force: each box's bytes, whatever the array's strides."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs.base import BLOCK_NBYTES
from dcp_nvcomp.format.blocks import BlockGrid, Box, Strip, alone, box_grid, row_strip, strips
from tests.effort import examples

DRAWN = settings(max_examples=examples(200), deadline=None)


@st.composite
def grids(draw: st.DrawFn) -> BlockGrid:
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    return BlockGrid(tuple(shape), tuple(draw(st.integers(1, size + 2)) for size in shape))


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
    grid = data.draw(grids())
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
    grid = data.draw(grids())
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
    # one behind the other, as rows are as short
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
