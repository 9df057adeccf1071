"""The arena: pieces never overlap, what is given back is given out again, and it holds no more than it may."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_nvcomp.engines.cuda.arena import ALIGNMENT_NBYTES, Arena, Piece


class Memory:
    """Device memory of a limited size.

    Attributes:
        reserved: sizes of what was reserved, in turn.
        refused: sizes of what was not there.
    """

    def __init__(self, capacity_nbytes: int = 1 << 40) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.reserved: list[int] = []
        self.refused: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.capacity_nbytes:
            self.refused.append(nbytes)
            raise torch.OutOfMemoryError("none left")
        self.reserved.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


def arena_of(nbytes: int, memory: Memory | None = None) -> Arena:
    arena = Arena(memory or Memory())
    arena.set_limit(nbytes)
    return arena


@given(st.lists(st.integers(-20, 9000), max_size=60))
def test_pieces_never_overlap(steps: list[int]) -> None:
    """A negative number gives back one of the pieces that are held."""
    arena, held = arena_of(64 << 10), list[tuple[Piece, int]]()
    for step in steps:
        if step < 0 and held:
            held.pop(step % len(held))[0].give_back()
            continue
        nbytes = abs(step)
        try:
            piece = arena.take(nbytes)
        except torch.OutOfMemoryError:
            assert sum(size + ALIGNMENT_NBYTES for _, size in held) + nbytes > (64 << 10) / 2 - ALIGNMENT_NBYTES
            continue
        assert piece.ptr % ALIGNMENT_NBYTES == 0
        assert all(piece.ptr + nbytes <= one.ptr or one.ptr + size <= piece.ptr for one, size in held)
        held.append((piece, nbytes))


def test_all_of_it_is_there_again() -> None:
    arena = arena_of(1 << 20)
    for seed in range(20):
        pieces = [arena.take(random.Random(seed).randrange(1, 60_000)) for _ in range(15)]
        random.Random(seed).shuffle(pieces)
        for piece in pieces:
            piece.give_back()
    whole = arena.take((1 << 20) - ALIGNMENT_NBYTES)
    with pytest.raises(torch.OutOfMemoryError, match="1048576 bytes of an engine"):
        arena.take(2 * ALIGNMENT_NBYTES)
    whole.give_back()


def test_a_tensor_gives_its_memory_back() -> None:
    arena = arena_of(100_000)
    for _ in range(20):
        tensor = arena.empty(90_000)
        assert tensor.numel() == 90_000 and tensor.dtype == torch.uint8
        with pytest.raises(torch.OutOfMemoryError):
            arena.empty(90_000)
        del tensor


def test_what_is_in_use_outlives_a_release() -> None:
    memory = Memory()
    arena = arena_of(1 << 16, memory)
    held = arena.empty(5000).fill_(7)
    arena.release()
    other = arena.empty(60_000).fill_(9)
    assert (held == 7).all() and (other == 9).all()
    assert memory.reserved == [1 << 16] * 2


def test_it_makes_do_with_what_there_is() -> None:
    memory = Memory(50_000)
    arena = arena_of(1 << 20, memory)
    assert arena.capacity_nbytes == 1 << 15
    memory.capacity_nbytes = 1 << 30
    arena.set_limit(1 << 20)
    assert arena.capacity_nbytes == 1 << 15, "and does not ask for every batch"
    arena.retry()
    arena.set_limit(1 << 20)
    assert arena.capacity_nbytes == 1 << 20, "there is memory again"


def test_without_any_memory() -> None:
    arena = arena_of(1 << 20, Memory(100))
    assert arena.capacity_nbytes == 0
    with pytest.raises(torch.OutOfMemoryError):
        arena.take(1)


def test_it_grows_for_one_large_batch() -> None:
    arena = arena_of(8192)
    arena.grow(100_000)
    arena.empty(100_000)
    arena.grow(50_000)
    assert 100_000 <= arena.capacity_nbytes <= 102_000


@pytest.mark.parametrize("limit", [4096, 1 << 18, 1 << 26])
def test_it_holds_no_more_than_its_limit(limit: int) -> None:
    memory, returned = Memory(), list[int]()
    arena = Arena(memory, lambda: returned.append(1))
    for nbytes in (1 << 26, limit, limit):
        arena.set_limit(nbytes)
        arena.empty(1000)
    assert memory.reserved == ([1 << 26, limit] if limit < 1 << 26 else [limit])
    assert len(returned) == (limit < 1 << 26), "to the device, and not only to the allocator below"


def test_what_it_grew_by_is_given_back() -> None:
    memory = Memory()
    arena = arena_of(8192, memory)
    held = arena.empty(5000)
    arena.grow(100_000)
    arena.settle()
    assert arena.capacity_nbytes == 8192
    arena.settle()
    assert memory.reserved[0] == memory.reserved[-1] == 8192 and len(memory.reserved) == 3
    del held


def test_each_size_that_is_not_there_is_asked_for_once() -> None:
    memory = Memory(50_000)
    arena = arena_of(1 << 20, memory)
    for _ in range(5):
        arena.set_limit(1 << 20)
        arena.empty(1000)
        arena.grow(60_000)
        arena.grow(500_000)
    assert memory.refused == [1 << at for at in range(20, 15, -1)] + [60_928]
    assert arena.capacity_nbytes == 1 << 15


def give_back(pieces: list[Piece]) -> None:
    for piece in pieces:
        piece.give_back()


def test_any_thread_may_give_back() -> None:
    arena = arena_of(1 << 20)
    for _ in range(50):
        pieces = [arena.take(10_000) for _ in range(90)]
        threads = [threading.Thread(target=give_back, args=(pieces[at::3],)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    gc.collect()
    assert arena.take((1 << 20) - ALIGNMENT_NBYTES)


def test_what_is_kept_lies_at_the_end() -> None:
    arena = arena_of(1 << 20)
    held = [arena.take(1000), arena.take_kept(5000), arena.take(1000), arena.take_kept(700)]
    starts = [piece.ptr for piece in held]
    assert starts[0] < starts[2] < starts[3] < starts[1]
    assert all(piece.ptr % ALIGNMENT_NBYTES == 0 for piece in held)
    held[0].give_back()
    held[2].give_back()
    arena.take((1 << 20) - 5120 - 1024 - ALIGNMENT_NBYTES)


def test_what_is_kept_is_freed_before_more_is_reserved() -> None:
    """Also where the device has far less than the limit."""
    memory = Memory(50_000)
    arena = arena_of(1 << 20, memory)
    keeper = Keeper(arena)
    arena.set_keeper(weakref.WeakMethod(keeper.forget))
    assert arena.fitting([8000] * 8, 0, 8) == 4
    keeper.pieces.append(arena.take_kept(16_000))
    assert arena.fitting([8000] * 8, 0, 8) == 4 and not keeper.pieces
    keeper.pieces.append(arena.take_kept(3000))
    assert arena.fitting([8000] * 8, 0, 8) == 3 and keeper.pieces, "not much"
    arena.grow(32_000)
    assert not keeper.pieces and memory.reserved == [1 << 15]


class Keeper:
    """Keeps memory until it is told to forget it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.pieces: list[Piece] = []

    def forget(self) -> None:
        for piece in self.pieces:
            piece.give_back()
        self.pieces.clear()


def test_little_memory_is_not_worth_all_that_torch_has_cached() -> None:
    """`torch.cuda.empty_cache` takes from training too; a self-test leaves a region that the first save replaces."""
    returned: list[int] = []
    memory = Memory()
    arena = Arena(memory, lambda: returned.append(memory.reserved[-1]))
    for nbytes in (1 << 20, 128 << 20, 1 << 20):
        arena.set_limit(nbytes)
        arena.reserve()
    assert memory.reserved == [1 << 20, 128 << 20, 1 << 20] and returned == [128 << 20]
