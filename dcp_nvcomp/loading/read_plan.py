"""The reads of a load: from read items to the blocks that hold them, and on to few, larger reads of the data files."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_nvcomp.errors import FileMismatchError, MetadataError, ShapeMismatchError
from dcp_nvcomp.format.blocks import BlockGrid, Box
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import Shard, ShardIndex, described, matches
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, Record
from dcp_nvcomp.loading.destinations import Destination

U8 = npt.NDArray[np.uint8]

# Up to about this size, reading a gap costs less than another request.
GAP_NBYTES = 16 << 10


@dataclass(frozen=True)
class Wanted:
    """A read item, where it is stored according to `.metadata`, and its shard (None for a Python object)."""

    item: ReadItem
    stored: Any
    shard: Shard | None

    @staticmethod
    def of(item: ReadItem, stored: Any, shards: ShardIndex) -> Wanted:
        index = item.storage_index
        shard = shards.find(index)
        if shard is None and shards.is_tensor(index.fqn):
            raise MetadataError(f"`.metadata` lists no shard at {index.offset}.", fqn=index.fqn)
        return Wanted(item, stored, shard)


@dataclass
class Target:
    """A read item with the blocks that hold it and, once resolved, its destination."""

    item: ReadItem
    record: Record
    holder: Record  # the record whose blocks hold it: `record` itself, or its pack
    region: Box  # the region to load, in the coordinates of `record`; all of a bytes item or a payload
    blocks: tuple[int, ...]  # numbers of the holder's blocks that it needs
    missing: int  # how many of them are not placed yet
    payload: Any = None  # for the planner: the tensor that it resolved, or the bytes of an object
    _destination: Destination | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        return math.prod(self.region.sizes) * self.record.element.nbytes

    @property
    def is_resolved(self) -> bool:
        """True once there is a destination, which is made when the first block is about to be fetched."""
        return self._destination is not None

    @property
    def destination(self) -> Destination:
        assert self._destination is not None, "resolved before its first block is fetched"
        return self._destination

    def resolve(self, destination: Destination) -> None:
        self._destination = destination

    def keep(self, data: U8) -> None:
        self.payload = data.tobytes()

    def block_placed(self) -> bool:
        """Count a block as placed; return True if it was the last one."""
        with self._lock:
            self.missing -= 1
            return self.missing == 0


@dataclass(frozen=True)
class BlockRead:
    """A block to read, and the targets that need it."""

    number: int  # its row in the block table
    record: Record  # the record that it is part of
    box: Box  # its box in the record
    start: int  # its first byte in the file
    stop: int  # its end in the file
    targets: list[Target]  # the targets that need it


@dataclass(frozen=True)
class Read:
    """One range of a file, and the blocks to load from it."""

    name: str
    footer: Footer
    start: int
    stop: int
    blocks: tuple[BlockRead, ...]


def locate(wanted_item: Wanted, footer: Footer) -> Target:
    """Find the record of a read item, and which blocks it needs."""
    item, number = wanted_item.item, wanted_item.stored.record
    index = item.storage_index
    if not 0 <= number < len(footer.records):
        raise FileMismatchError(
            f"`.metadata` names record {number}; the file has {len(footer.records)}.", path=footer.path, fqn=index.fqn
        )
    record = footer.records[number]
    if not _agrees(record, wanted_item):
        raise FileMismatchError(
            f"The footer disagrees with `.metadata`: record {number} {described(record)}.",
            path=footer.path,
            fqn=index.fqn,
        )
    wanted = Box((0,), (record.elements,))
    if record.kind == KIND_TENSOR:
        region = Box(tuple(item.storage_offsets), tuple(item.lengths))
        _check_inside(region, record, footer)
        wanted = region
    elif record.kind == KIND_BYTES:
        region = wanted
    else:
        region = Box(tuple(item.storage_offsets), tuple(item.lengths))
    holder = record
    if record.pack is not None:
        holder = footer.records[record.pack[0]]
        wanted = Box((record.pack[1],), (record.elements,))
    assert holder.grid is not None
    blocks = tuple(holder.grid.overlapping(wanted))
    return Target(item, record, holder, region, blocks, len(blocks))


def _agrees(record: Record, wanted_item: Wanted) -> bool:
    item, shard = wanted_item.item, wanted_item.shard
    if item.type == LoadItemType.BYTE_IO:
        return matches(record, item.storage_index.fqn, None)
    return shard is not None and matches(record, item.storage_index.fqn, shard)


def _check_inside(region: Box, record: Record, footer: Footer) -> None:
    if len(region.offsets) != len(record.shape) or any(
        offset < 0 or size < 0 or offset + size > limit
        for offset, size, limit in zip(region.offsets, region.sizes, record.shape, strict=True)
    ):
        raise ShapeMismatchError(
            f"{region} was requested, but the saved shard has shape {record.shape}.", path=footer.path, fqn=record.fqn
        )


def plan_reads(file: DataFileRef, footer: Footer, targets: Iterable[Target], limit_nbytes: int) -> list[Read]:
    """Plan the reads that fetch every block that some targets of a file need, each block once."""
    wanted: dict[int, BlockRead] = {}
    offsets: list[int] = footer.block_offsets.tolist()
    for target in targets:
        grid: BlockGrid | None = target.holder.grid
        assert grid is not None
        for index in target.blocks:
            number = target.holder.first_block + index
            block = wanted.get(number)
            if block is None:
                start, stop = offsets[number : number + 2]
                block = wanted[number] = BlockRead(number, target.holder, grid.box(index), start, stop, [])
            block.targets.append(target)
    blocks: Sequence[BlockRead] = list(wanted.values())
    # The first block's read begins at the file's first byte, so that a load of the whole file checks every byte of it.
    spans = [(0 if block.number == 0 else block.start, block.stop) for block in blocks]
    return [
        Read(file.name, footer, read.start, read.stop, tuple(blocks[piece] for piece in read.pieces))
        for read in coalesce(spans, GAP_NBYTES, limit_nbytes)
    ]


@dataclass(frozen=True)
class ByteRange:
    """One read: a half-open range of a file, and which of the wanted pieces lie in it."""

    start: int
    stop: int
    pieces: tuple[int, ...]


def coalesce(pieces: Sequence[tuple[int, int]], gap_nbytes: int, limit_nbytes: int) -> list[ByteRange]:
    """Join pieces of a file into larger reads."""
    reads: list[ByteRange] = []
    members: list[int] = []
    begin = end = 0
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index]):
        start, stop = pieces[index]
        if members and (start - end > gap_nbytes or stop - begin > limit_nbytes):
            reads.append(ByteRange(begin, end, tuple(members)))
            members = []
        if not members:
            begin = start
        members.append(index)
        end = stop
    if members:
        reads.append(ByteRange(begin, end, tuple(members)))
    return reads
