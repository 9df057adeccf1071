"""Which blocks one thread encodes at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from dcp_nvcomp.codecs import Bytes, CodecChain
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from dcp_nvcomp.format.blocks import BlockGrid
from dcp_nvcomp.format.record import KIND_TENSOR, Record
from dcp_nvcomp.saving.encode.buffers import BufferPool, Cancelled
from dcp_nvcomp.saving.encode.sources import CudaSource, HostSource, PendingRecord, Source
from dcp_nvcomp.saving.encode.tasks import Task, Tasks

BLOCK = 64
CHAIN = CodecChain(Bytes())


class Gathered:
    """Tasks whose buffers hold four blocks, and what came out of them."""

    def __init__(self, *records: tuple[str, int, Source]) -> None:
        self.pool = BufferPool(4 * CHAIN.max_encoded_nbytes(BLOCK), 1 << 20, 100)
        tasks = Tasks(lambda source: self.pool)
        self.out: list[Task] = []
        for name, blocks, source in records:
            size, grid = (blocks * BLOCK,), BlockGrid((blocks * BLOCK,), (BLOCK,))
            record = Record(KIND_TENSOR, name, size, (0,), size, ELEMENT_TYPES["uint8"], None, grid, CHAIN)
            self.out += tasks.add(PendingRecord(record, "uint8", ()), source)
        self.out += tasks.flush()
        for task in self.out:
            assert sum(count for _, count, _ in task.records) == sum(len(part.boxes) for part in task.parts)
            assert bool(task.parts) == (task.memory is not None), "room is reserved for what needs one"

    def names(self) -> list[list[tuple[str, int, bool]]]:
        """The records of each task: the name, how many of its blocks, and whether it begins there."""
        return [[(record.record.fqn, count, begins) for record, count, begins in task.records] for task in self.out]


HOST = HostSource(np.zeros(100 * BLOCK, np.uint8))
# nothing is encoded here, so any device will do
DEVICE = CudaSource([torch.zeros(100 * BLOCK, dtype=torch.uint8)])
OTHER = CudaSource([torch.zeros(100 * BLOCK, dtype=torch.uint8, device="meta")])


TASKS: dict[str, tuple[list[tuple[str, int, Source]], list[list[tuple[str, int, bool]]]]] = {
    "what fits a buffer of the CPU": (
        [("a", 6, HOST), ("b", 1, HOST), ("c", 4, HOST)],
        [[("a", 4, True)], [("a", 2, False), ("b", 1, True), ("c", 1, True)], [("c", 3, False)]],
    ),
    "what fits a buffer of CUDA": (
        [("a", 3, DEVICE), ("b", 6, DEVICE), ("c", 1, DEVICE)],
        [[("a", 3, True), ("b", 1, True)], [("b", 4, False)], [("b", 1, False), ("c", 1, True)]],
    ),
    "another device is another task": (
        [("a", 1, DEVICE), ("b", 1, OTHER), ("c", 1, HOST), ("d", 1, DEVICE)],
        [[("a", 1, True)], [("b", 1, True)], [("c", 1, True)], [("d", 1, True)]],
    ),
    "an empty record begins in its turn": (
        [("a", 1, DEVICE), ("empty", 0, HOST), ("b", 1, DEVICE)],
        [[("a", 1, True), ("empty", 0, True), ("b", 1, True)]],
    ),
    "empty records alone need no buffer": ([("empty", 0, DEVICE)], [[("empty", 0, True)]]),
}


@pytest.mark.parametrize("what", TASKS)
def test_tasks(what: str) -> None:
    records, expected = TASKS[what]
    gathered = Gathered(*records)
    assert gathered.names() == expected
    if what == "what fits a buffer of CUDA":
        boxes = [box.offsets[0] // BLOCK for task in gathered.out for box in task.parts[-1].boxes]
        assert boxes[:5] == [0, 1, 2, 3, 4]
    if what == "another device is another task":
        devices = [task.cuda_device for task in gathered.out]
        assert devices == [torch.device("cpu"), torch.device("meta"), None, torch.device("cpu")]
    if what == "empty records alone need no buffer":
        assert gathered.out[0].cuda_device is None and gathered.out[0].memory is None


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
