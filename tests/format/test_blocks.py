"""Geometry of blocks against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs.base import BLOCK_NBYTES
from dcp_nvcomp.format.blocks import BlockGrid, Box, default_block_shape
from tests.effort import examples

DRAWN = settings(max_examples=examples(200), deadline=None)


@st.composite
def grids(draw: st.DrawFn) -> BlockGrid:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    return BlockGrid(tuple(shape), tuple(draw(st.integers(1, size + 2)) for size in shape))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


def owners(grid: BlockGrid) -> np.ndarray:
    """The number of the block that each element lies in, -1 where there is none; fails where two blocks overlap."""
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
def test_default_block_shape(shape: list[int], element_nbytes: int, block_nbytes: int) -> None:
    block = default_block_shape(shape, element_nbytes, block_nbytes)
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
def test_default_block_shape_by_example(shape: tuple[int, ...], element_nbytes: int, block: tuple[int, ...]) -> None:
    assert default_block_shape(shape, element_nbytes) == block


def test_overlapping_takes_only_what_is_asked_for() -> None:
    grid = BlockGrid((1 << 40, 1 << 20), (1, 1 << 20))
    assert list(grid.overlapping(Box((1 << 39, 5), (2, 1)))) == [1 << 39, (1 << 39) + 1]
    assert grid.box(1 << 39) == Box((1 << 39, 0), (1, 1 << 20))
