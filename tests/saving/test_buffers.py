"""The buffers between encoders and writers: how many there are, and which is taken."""

from __future__ import annotations

import threading

import pytest

from dcp_nvcomp.saving.encode.buffers import BufferPool, Cancelled


class Counted:
    """Allocates, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, nbytes: int) -> memoryview:
        self.count += 1
        return memoryview(bytearray(nbytes))


def test_only_what_is_full_at_once_is_allocated() -> None:
    allocate = Counted()
    pool = BufferPool(64, 640, 10, allocate)
    for _ in range(10):
        pool.reserve()
    assert not allocate.count, "a reservation takes no memory"
    for _ in range(10):
        pool.take().release()
    assert allocate.count == 1


def test_the_last_one_given_back_is_the_next_taken() -> None:
    pool = BufferPool(64, 640, 10, Counted())
    for _ in range(3):
        pool.reserve()
    first, second, third = pool.take(), pool.take(), pool.take()
    for buffer in (first, third, second):
        buffer.release()
    assert pool.take() is second and pool.take() is third


@pytest.mark.parametrize(("budget", "most", "count"), [(640, 4, 4), (640, 100, 10), (0, 100, 2), (640, 1, 2)])
def test_no_more_are_reserved_than_the_budget_has_room_for(budget: int, most: int, count: int) -> None:
    pool = BufferPool(64, budget, most, Counted())
    assert pool.limit_nbytes == count * 64
    for _ in range(count):
        pool.reserve()
    reserved = threading.Event()

    def reserve() -> None:
        pool.reserve()
        reserved.set()

    thread = threading.Thread(target=reserve)
    thread.start()
    assert not reserved.wait(0.05)
    pool.unreserve()  # nothing was encoded into it
    thread.join()
    assert reserved.is_set()


def test_closing_ends_the_wait() -> None:
    pool = BufferPool(64, 128, 2, Counted())
    pool.reserve()
    pool.reserve()
    pool.close()
    with pytest.raises(Cancelled):
        pool.reserve()
