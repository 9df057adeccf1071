"""From records to tasks: units that one thread encodes, and another writes, at once.

A task gathers blocks of consecutive records of one file: about 1 MiB for the CPU engine, so that little time goes into
handing over; far more for the CUDA engine, which wants thousands of slices at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from dcp_nvcomp.codecs.auto import most_encoded_nbytes
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.format.blocks import Box
from dcp_nvcomp.saving.encode.buffers import Room, TaskMemory
from dcp_nvcomp.saving.encode.sources import ChainChoice, Part, PendingRecord, Source


class Task:
    """Blocks of consecutive records of one file, and the records that begin among them."""

    __slots__ = ("blocks", "done", "memory", "parts", "records", "room")

    def __init__(self) -> None:
        self.parts: list[Part] = []  # by one engine; dropped once encoded, so that tensors may be freed before writing
        # of each the number of its blocks here, and whether it begins here
        self.records: list[tuple[PendingRecord, int, bool]] = []
        self.memory: TaskMemory | None = None
        self.room: Room | None = None
        self.blocks: list[EncodedBlock] = []
        # held until encoded: a lock and not an Event, which takes ten times as long (4 us) for each block of 1 MiB
        self.done = threading.Lock()
        self.done.acquire()

    @property
    def cuda_device(self) -> torch.device | None:
        """The device whose CUDA engine encodes it; None for the CPU engine."""
        return self.parts[0].source.cuda_device if self.parts else None

    def release(self) -> None:
        """Give up its memory: its blocks are written, or never will be."""
        if self.room is not None:
            self.room.release()
        elif self.memory is not None:
            self.memory.unreserve()


class Tasks:
    """Gathers the records of one file after the other. Room is reserved only for a task that is complete."""

    def __init__(self, memory_for: Callable[[Source], TaskMemory]) -> None:
        self._memory_for = memory_for
        self._task = Task()
        self._memory: TaskMemory | None = None
        self._room_nbytes = 0

    def add(self, record: PendingRecord, source: Source) -> Iterator[Task]:
        grid, choice, element_nbytes = record.grid, record.choice, record.record.element.nbytes
        # a record without elements has nothing to encode, but begins all the same, and in its turn
        if grid.block_count:
            yield from self._change_to(source)
        begins, boxes = True, list[Box]()
        for number in range(grid.block_count):
            box = grid.box(number)
            needs = _most_encoded_nbytes(record, box.elements * element_nbytes)
            if needs > self._room_nbytes and (boxes or self._task.parts):
                if boxes:
                    self._append(record, source, choice, boxes, begins)
                    begins, boxes = False, []
                yield from self.flush()
                yield from self._change_to(source)
            boxes.append(box)
            self._room_nbytes -= needs
        self._append(record, source, choice, boxes, begins)

    def _change_to(self, source: Source) -> Iterator[Task]:
        """Continue with a task that can take blocks of this source."""
        if self._task.parts and self._task.cuda_device != source.cuda_device:
            yield from self.flush()
        if not self._task.parts:
            self._memory = self._memory_for(source)
            self._room_nbytes = self._memory.room_nbytes

    def _append(
        self, record: PendingRecord, source: Source, choice: ChainChoice, boxes: list[Box], begins: bool
    ) -> None:
        self._task.records.append((record, len(boxes), begins))
        if boxes:
            self._task.parts.append(Part(source, choice, boxes))

    def flush(self) -> Iterator[Task]:
        task, self._task = self._task, Task()
        if task.parts:
            assert self._memory is not None
            self._memory.reserve()
            task.memory = self._memory
        if task.records:
            yield task


def _most_encoded_nbytes(record: PendingRecord, nbytes: int) -> int:
    """Return an upper bound of the encoded size of one block of a record, `nbytes` long."""
    if record.record.chain is not None:
        return record.choice.chain.max_encoded_nbytes(nbytes)
    return most_encoded_nbytes(nbytes)
