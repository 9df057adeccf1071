"""Which reads fetch some pieces of a file."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_nvcomp.loading.read_plan import ByteRange, coalesce


def test_nothing_wanted() -> None:
    assert coalesce([], 10, 100) == []


@pytest.mark.parametrize(("gap", "joined"), [(0, False), (3, False), (4, True)])
def test_a_gap_is_read_along_up_to_its_limit(gap: int, joined: bool) -> None:
    apart = [ByteRange(0, 10, (0,)), ByteRange(14, 20, (1,))]
    assert coalesce([(0, 10), (14, 20)], gap, 100) == ([ByteRange(0, 20, (0, 1))] if joined else apart)


def test_pieces_that_touch_are_joined_without_any_gap() -> None:
    assert coalesce([(0, 10), (10, 20)], 0, 100) == [ByteRange(0, 20, (0, 1))]


@pytest.mark.parametrize(("limit", "joined"), [(19, False), (20, True)])
def test_a_read_ends_at_the_limit(limit: int, joined: bool) -> None:
    assert len(coalesce([(0, 10), (10, 20)], 0, limit)) == (1 if joined else 2)


def test_a_piece_longer_than_the_limit_is_a_read_of_its_own() -> None:
    assert coalesce([(0, 5), (5, 500), (500, 505)], 0, 100) == [
        ByteRange(0, 5, (0,)),
        ByteRange(5, 500, (1,)),
        ByteRange(500, 505, (2,)),
    ]


def test_pieces_in_any_order_and_empty_ones() -> None:
    assert coalesce([(20, 30), (0, 10), (10, 10)], 0, 100) == [ByteRange(0, 10, (1, 2)), ByteRange(20, 30, (0,))]


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
