"""Which reads fetch some pieces of a file."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_nvcomp.loading.read_plan import ByteRange, coalesce


@pytest.mark.parametrize(
    ("pieces", "gap", "limit", "expected"),
    [
        ([], 10, 100, []),
        ([(0, 10), (14, 20)], 3, 100, [(0, 10, (0,)), (14, 20, (1,))]),
        ([(0, 10), (14, 20)], 4, 100, [(0, 20, (0, 1))]),
        ([(0, 10), (10, 20)], 0, 19, [(0, 10, (0,)), (10, 20, (1,))]),
        ([(0, 5), (5, 500), (500, 505)], 0, 100, [(0, 5, (0,)), (5, 500, (1,)), (500, 505, (2,))]),
        ([(20, 30), (0, 10), (10, 10)], 0, 100, [(0, 10, (1, 2)), (20, 30, (0,))]),
    ],
)
def test_examples(pieces: list[tuple[int, int]], gap: int, limit: int, expected: list[tuple[Any, ...]]) -> None:
    assert coalesce(pieces, gap, limit) == [ByteRange(*one) for one in expected]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50))),
    gap=st.integers(0, 20),
    limit=st.integers(1, 100),
    seed=st.randoms(use_true_random=False),
)
def test_every_piece_is_in_one_read_within_the_limits(
    lengths: list[tuple[int, int]], gap: int, limit: int, seed: random.Random
) -> None:
    pieces, end = list[tuple[int, int]](), 0
    for skipped, nbytes in lengths:
        pieces.append((end + skipped, end + skipped + nbytes))
        end += skipped + nbytes
    seed.shuffle(pieces)
    reads = coalesce(pieces, gap, limit)
    assert sorted(index for read in reads for index in read.pieces) == list(range(len(pieces)))
    for read in reads:
        inside = [pieces[index] for index in read.pieces]
        assert (read.start, read.stop) == (inside[0][0], inside[-1][1])
        assert len(inside) == 1 or read.stop - read.start <= limit
        assert all(later[0] - earlier[1] <= gap for earlier, later in itertools.pairwise(inside))
    for earlier, later in itertools.pairwise(reads):
        assert earlier.stop <= later.start
        first = pieces[later.pieces[0]]
        assert first[0] - earlier.stop > gap or first[1] - earlier.start > limit, "these could be one read"
