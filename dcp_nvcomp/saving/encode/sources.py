"""Sources of a save: a shard's elements, block by block, and the engine that encodes them where they are."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_nvcomp.codecs.base import CodecChain, EncodedBlock, ScratchArrays
from dcp_nvcomp.codecs.choose import Judge
from dcp_nvcomp.codecs.encoded_run import encoded_nbytes
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.batches import starts_of
from dcp_nvcomp.engines.cuda.encode import EncodeJob
from dcp_nvcomp.engines.cuda.fallback import EnginePolicy
from dcp_nvcomp.engines.cuda.pool import shared_pool
from dcp_nvcomp.engines.cuda.streams import stream_beside
from dcp_nvcomp.engines.tensors import HostArray, host_copy
from dcp_nvcomp.format.block_grid import BlockGrid, Box, RowStrip, alone, element_span, row_strip, strips
from dcp_nvcomp.format.record import KIND_PACK, Record

U8 = npt.NDArray[np.uint8]


class Workbench:
    def __init__(self, policy: EnginePolicy) -> None:
        self.cpu = CpuEngine()
        self.scratch, self.base_scratch = ScratchArrays(), ScratchArrays()
        self.judge = Judge()
        self.policy = policy
        self.waited_seconds = 0.0  # for engines


class ChainChoice:
    """The codec chain of a record: a given one, or in a subclass one that is found when its first block is encoded."""

    def __init__(self, chain: CodecChain | None) -> None:
        self._chain = chain

    @property
    def chain(self) -> CodecChain:
        """The chain, once it is settled."""
        assert self._chain is not None, "settled when its first block is encoded"
        return self._chain

    def settle(self, bench: Workbench) -> CodecChain:
        """Return the chain; find it now if necessary, on the thread that encodes."""
        return self.chain

    def confirm(self, ratio: float, bench: Workbench) -> CodecChain:
        """Return the chain to use, now that a block came to `ratio`: another one if a record of one block surprises."""
        return self.chain

    def achieved(self, ratio: float) -> None:
        """Take note of the record's stored over its uncompressed size."""


class Source:
    """A record's elements, for one engine."""

    has_boxes: ClassVar[bool] = False  # whether blocks may be boxes; what a device or a copy yields is runs of memory
    cuda_device: torch.device | None = None  # whose CUDA engine encodes them; None: the CPU engine does


class Part(NamedTuple):
    source: Source
    choice: ChainChoice
    boxes: Sequence[Box]


def encode_parts(
    parts: Sequence[Part], take: Callable[[], memoryview], bench: Workbench
) -> tuple[Sequence[EncodedBlock], int]:
    """Encode blocks of one engine into memory that is taken when it is needed; return them, and how long they are."""
    device = parts[0].source.cuda_device
    if device is not None:
        jobs: list[EncodeJob] = []
        for part in parts:
            assert isinstance(part.source, _CudaEncoded)
            jobs += part.source.jobs(part.boxes, part.choice.chain)
        asked = time.perf_counter()
        with shared_pool().lend(device, bench.policy) as engine:
            bench.waited_seconds += time.perf_counter() - asked
            out = take()
            encoded = engine.encode_checked(jobs, out)
        # another thread may have the engine meanwhile
        encoded = engine.put_right(jobs, encoded, out, bench.policy)
        return encoded, encoded_nbytes(encoded)
    blocks: list[EncodedBlock] = []
    out, position = take(), 0
    for part in parts:
        assert isinstance(part.source, _HostEncoded)
        chain = part.choice.settle(bench)
        if isinstance(part.source, DerivedSource):
            for base, rows in part.source.blocks(part.boxes, bench):
                blocks.append(bench.cpu.encode_from(base, rows, chain, out[position:]))
                position += len(blocks[-1].data)
            continue
        for strip in part.source.strips(part.boxes, bench):
            encoded, nbytes = bench.cpu.encode_beside(*strip, chain, out[position:])
            if len(part.boxes) == 1:  # only a record of one block can surprise, and its strip is a view of the tensor
                confirmed = part.choice.confirm(nbytes / encoded[0].uncompressed_nbytes, bench)
                if confirmed is not chain:
                    encoded, nbytes = bench.cpu.encode_beside(*strip, confirmed, out[position:])
            blocks += encoded
            position += nbytes
    return blocks, position


class _HostEncoded(Source, ABC):
    @abstractmethod
    def strips(self, boxes: Sequence[Box], bench: Workbench) -> Iterator[RowStrip]:
        """Yield consecutive blocks, each strip valid until the next."""


@dataclass(frozen=True)
class HostSource(_HostEncoded):
    has_boxes = True

    array: HostArray

    def strips(self, boxes: Sequence[Box], bench: Workbench) -> Iterator[RowStrip]:
        at = 0
        for strip in strips(boxes, self.array.itemsize):
            rows = row_strip(self.array, strip)
            if rows is not None:
                yield rows
            else:
                for box in boxes[at : at + len(strip.sizes)]:
                    yield _one_row(block_bytes(self.array, box, bench.scratch))
            at += len(strip.sizes)


@dataclass(frozen=True)
class DerivedSource(HostSource):
    """A shard in host memory, and the one that it is derived from."""

    base: HostArray

    def blocks(self, boxes: Sequence[Box], bench: Workbench) -> Iterator[tuple[U8, U8]]:
        """Yield the base of each block, and the block, valid until the next."""
        for box in boxes:
            yield _rows(self.base, box, bench.base_scratch), _rows(self.array, box, bench.scratch)


def _rows(array: HostArray, box: Box, scratch: ScratchArrays) -> U8:
    strip = row_strip(array, alone(box))
    return block_bytes(array, box, scratch)[np.newaxis] if strip is None else strip.rows


def _one_row(block: U8) -> RowStrip:
    return RowStrip(block[np.newaxis], (block.size,))


def _ready_event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


@dataclass(frozen=True)
class AcceleratorSource(_HostEncoded):
    """A shard on any device, encoded on the CPU. Made on the caller's thread, whose work on the device comes first.

    Attributes:
        tensor: its elements.
        made_from: what the device may still read to make the tensor; it may be another's once this is dropped.
    """

    tensor: torch.Tensor
    made_from: Sequence[torch.Tensor] = ()
    ready: torch.cuda.Event | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", _ready_event(self.tensor))

    def strips(self, boxes: Sequence[Box], bench: Workbench) -> Iterator[RowStrip]:
        for box in boxes:
            with nullcontext() if self.ready is None else stream_beside(self.tensor.device, self.ready):
                block: U8 = host_copy(self.tensor[box.index]).reshape(-1).view(torch.uint8).numpy()
            assert block.dtype == np.uint8
            yield _one_row(block)


class _CudaEncoded(Source, ABC):
    """Elements on a CUDA device, encoded there, many blocks at once.

    Must be made on the caller's thread. The engine's stream waits for the work that the caller has queued by then, and
    for no later work.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self.cuda_device = tensors, tensors[0].device
        self.ready = _ready_event(tensors[0])

    @abstractmethod
    def jobs(self, boxes: Sequence[Box], chain: CodecChain) -> list[EncodeJob]:
        """Return the engine's jobs for some of the blocks."""


class CudaSource(_CudaEncoded):
    """A tensor whose blocks are those of a `row_grid`, which follow each other in memory."""

    def jobs(self, boxes: Sequence[Box], chain: CodecChain) -> list[EncodeJob]:
        (tensor,) = self.tensors
        if not tensor.is_contiguous():
            return [EncodeJob((tensor[box.index],), chain, self.ready) for box in boxes]
        if len(boxes) == 1 and boxes[0].elements == tensor.numel():  # of thousands of tensors
            return [EncodeJob((tensor,), chain, self.ready)]
        nbytes, first = tensor.element_size(), element_span(tensor.shape, boxes[0])[0]
        bounds = starts_of(np.array([box.elements for box in boxes])) + first
        assert element_span(tensor.shape, boxes[-1])[1] == bounds[-1]
        run = tensor.reshape(-1).view(torch.uint8)
        return [EncodeJob((run,), chain, self.ready, bounds * nbytes)]


class CudaPackSource(_CudaEncoded):
    """Small shards, one after the other in one block. The engine joins them, so that no copy of them waits for it."""

    def jobs(self, boxes: Sequence[Box], chain: CodecChain) -> list[EncodeJob]:
        assert len(boxes) == 1
        return [EncodeJob(tuple(self.tensors), chain, self.ready)]


def block_bytes(array: HostArray, box: Box, scratch: ScratchArrays) -> U8:
    """Return the bytes of one block of a shard in host memory in C order: a view if possible, else a copy."""
    part = array[box.index]
    if not part.flags.c_contiguous:
        copy = scratch.array("block", part.nbytes, np.uint8).view(array.dtype).reshape(part.shape)
        np.copyto(copy, part)
        part = copy
    flat: U8 = part.reshape(-1).view(np.uint8)
    return flat


class Member(NamedTuple):
    """One write item of a record: `.metadata` will name its place."""

    item_index: MetadataIndex
    record: Record  # that of an item in a pack lacks `pack`, which follows when it is written
    nbytes: int


class PendingRecord(NamedTuple):
    """A record with blocks, ready to be encoded. Its elements are in a `Source`, which may be dropped earlier."""

    record: Record  # without `first_block`, and its codec chain if that is still to be chosen
    dtype: str
    members: tuple[Member, ...]
    later: ChainChoice | None = None  # finds that chain, or takes note of what it comes to

    @property
    def grid(self) -> BlockGrid:
        assert self.record.grid is not None
        return self.record.grid

    @property
    def choice(self) -> ChainChoice:
        return self.later or ChainChoice(self.record.chain)

    @property
    def chain(self) -> CodecChain:
        return self.choice.chain

    @property
    def nbytes(self) -> int:
        return self.record.uncompressed_nbytes

    @property
    def is_pack(self) -> bool:
        return self.record.kind == KIND_PACK


Ready = tuple[PendingRecord, Source]
