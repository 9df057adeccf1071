"""Which blocks one thread encodes at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_nvcomp.codecs import Bytes, CodecChain
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from dcp_nvcomp.format.block_grid import BlockGrid
from dcp_nvcomp.format.record import KIND_TENSOR, Record
from dcp_nvcomp.saving.data_files import PlannedFile, distribute, file_count, plan_files, planned_nbytes, small_together
from dcp_nvcomp.saving.encode.sources import CudaSource, HostSource, PendingRecord, Source
from dcp_nvcomp.saving.encode.tasks import BufferPool, Cancelled, Task, Tasks

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


ID = "5d" * 16


def item(name: str, *sizes: int, dtype: torch.dtype = torch.float32) -> WriteItem:
    chunk = torch.distributed.checkpoint.ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(sizes))
    return WriteItem(MetadataIndex(name), WriteItemType.TENSOR, tensor_data=data)


def plan(items: list[WriteItem], **options: int) -> list[list[PlannedFile]]:
    units = [(one,) for one in items]
    return plan_files(units, 3, ID, **{"single_file_per_rank": True, "streams": 2, "file_nbytes": 100, **options})


def test_planned_sizes() -> None:
    assert planned_nbytes(item("w", 3, 5)) == 60
    assert planned_nbytes(item("half", 3, 5, dtype=torch.bfloat16)) == 30
    assert planned_nbytes(item("scalar")) == 4
    assert planned_nbytes(item("empty", 0, 5)) == 0
    assert planned_nbytes(WriteItem(MetadataIndex("bytes"), WriteItemType.BYTE_IO)) == 0


@pytest.mark.parametrize(
    ("total", "streams", "count"), [(0, 4, 1), (99, 4, 1), (199, 4, 1), (200, 4, 2), (1000, 4, 4), (1000, 1, 1)]
)
def test_file_count(total: int, streams: int, count: int) -> None:
    assert file_count(total, streams, 100) == count


def test_small_items_are_resolved_together() -> None:
    """As many as come to 1 MiB: those that are resolved together are in memory together."""
    bytes_item = WriteItem(MetadataIndex("bytes"), WriteItemType.BYTE_IO)
    items = [item("huge", 1 << 22), *(item(f"half {n}", 1 << 17) for n in range(3)), item("empty", 0), bytes_item]
    items += [bytes_item, *(item(f"tiny {n}", 64) for n in range(5000))]
    together = list(small_together(items))
    assert [one for some in together for one in some] == items
    names = [[one.index.fqn for one in some] for some in together[:5]]
    assert names == [["huge"], ["half 0", "half 1"], ["half 2", "empty"], ["bytes"], ["bytes"]]
    assert [len(some) for some in together[5:]] == [4096, 904]


def test_bins() -> None:
    assert distribute([1, 3, 2, 3], 1) == [[1, 3, 2, 0]], "the largest first"
    assert distribute([5], 3) == [[0], [], []]


@given(sizes=st.lists(st.integers(0, 1000)), bins=st.integers(1, 6))
def test_bins_hold_each_item_once_and_are_about_equal(sizes: list[int], bins: int) -> None:
    filled = distribute(sizes, bins)
    assert len(filled) == bins
    assert sorted(index for one in filled for index in one) == list(range(len(sizes)))
    for one in filled:
        assert [sizes[index] for index in one] == sorted((sizes[index] for index in one), reverse=True)
    totals = [sum(sizes[index] for index in one) for one in filled]
    assert max(totals) - min(totals) <= max(sizes, default=0)


LARGE = [item("a", 10), item("b", 30), item("c", 25)]


@pytest.mark.parametrize(
    ("items", "options", "files"),
    [
        ([], {}, []),
        ([item("a", 2), item("b", 10)], {}, [{0: "ba"}]),  # a small rank writes one file
        (LARGE, {}, [{0: "b"}, {1: "ca"}]),  # a large one a file for each stream
        (LARGE, {"single_file_per_rank": False}, [{1: "b"}, {2: "c", 0: "a"}]),
    ],
)
def test_which_items_go_into_which_file(
    items: list[WriteItem], options: dict[str, int], files: list[dict[int, str]]
) -> None:
    lanes = [
        {file.name: "".join(one.index.fqn for one in file.items) for file in lane} for lane in plan(items, **options)
    ]
    assert lanes == [{f"__3_{number}_{ID}.distcp": names for number, names in lane.items()} for lane in files]
