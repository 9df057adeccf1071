"""Which blocks one thread encodes at once."""

from __future__ import annotations

import numpy as np
import torch

from dcp_nvcomp.codecs import Bytes, CodecChain
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from dcp_nvcomp.format.blocks import BlockGrid
from dcp_nvcomp.format.record import KIND_TENSOR, Record
from dcp_nvcomp.saving.encode.buffers import BufferPool
from dcp_nvcomp.saving.encode.sources import CudaSource, HostSource, PendingRecord, Source
from dcp_nvcomp.saving.encode.tasks import Task, Tasks

BLOCK = 64
CHAIN = CodecChain(Bytes())


class Gathered:
    """Tasks whose buffers hold four blocks, and what came out of them."""

    def __init__(self) -> None:
        self.pool = BufferPool(4 * CHAIN.max_encoded_nbytes(BLOCK), 1 << 20, 100)
        self.tasks = Tasks(lambda source: self.pool)
        self.out: list[Task] = []

    def add(self, name: str, blocks: int, source: Source) -> None:
        shape = (blocks * BLOCK,)
        record = Record(
            KIND_TENSOR, name, shape, (0,), shape, ELEMENT_TYPES["uint8"], None, BlockGrid(shape, (BLOCK,)), CHAIN
        )
        self.out += self.tasks.add(PendingRecord(record, "uint8", ()), source)

    def end(self) -> list[list[tuple[str, int, bool]]]:
        """The records of each task: the name, how many of its blocks, and whether it begins there."""
        self.out += self.tasks.flush()
        for task in self.out:
            assert sum(count for _, count, _ in task.records) == sum(len(part.boxes) for part in task.parts)
            assert bool(task.parts) == (task.memory is not None), "room is reserved for what needs one"
        return [[(record.record.fqn, count, begins) for record, count, begins in task.records] for task in self.out]


HOST = HostSource(np.zeros(100 * BLOCK, np.uint8))
# nothing is encoded here, so any device will do
DEVICE = CudaSource([torch.zeros(100 * BLOCK, dtype=torch.uint8)])
OTHER = CudaSource([torch.zeros(100 * BLOCK, dtype=torch.uint8, device="meta")])


def test_the_cpu_engine_gets_what_fits_a_buffer() -> None:
    gathered = Gathered()
    gathered.add("a", 6, HOST)
    gathered.add("b", 1, HOST)
    gathered.add("c", 4, HOST)
    assert gathered.end() == [[("a", 4, True)], [("a", 2, False), ("b", 1, True), ("c", 1, True)], [("c", 3, False)]]


def test_the_cuda_engine_gets_what_fits_a_buffer() -> None:
    gathered = Gathered()
    gathered.add("a", 3, DEVICE)
    gathered.add("b", 6, DEVICE)
    gathered.add("c", 1, DEVICE)
    assert gathered.end() == [[("a", 3, True), ("b", 1, True)], [("b", 4, False)], [("b", 1, False), ("c", 1, True)]]
    assert [box.offsets[0] // BLOCK for task in gathered.out for box in task.parts[-1].boxes][:5] == [0, 1, 2, 3, 4]


def test_another_device_is_another_task() -> None:
    gathered = Gathered()
    gathered.add("a", 1, DEVICE)
    gathered.add("b", 1, OTHER)
    gathered.add("c", 1, HOST)
    gathered.add("d", 1, DEVICE)
    assert gathered.end() == [[("a", 1, True)], [("b", 1, True)], [("c", 1, True)], [("d", 1, True)]]
    devices = [task.cuda_device for task in gathered.out]
    assert devices == [torch.device("cpu"), torch.device("meta"), None, torch.device("cpu")]


def test_an_empty_record_begins_in_its_turn() -> None:
    gathered = Gathered()
    gathered.add("a", 1, DEVICE)
    gathered.add("empty", 0, HOST)
    gathered.add("b", 1, DEVICE)
    assert gathered.end() == [[("a", 1, True), ("empty", 0, True), ("b", 1, True)]]


def test_empty_records_alone_need_no_buffer() -> None:
    gathered = Gathered()
    gathered.add("empty", 0, DEVICE)
    assert gathered.end() == [[("empty", 0, True)]]
    assert gathered.out[0].cuda_device is None and gathered.out[0].memory is None
