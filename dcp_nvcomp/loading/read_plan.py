"""The reads of a load: from read items to the blocks that hold them, and on to few, larger reads of the data files.

Decoded blocks go to a `Destination`: the region of a tensor, a member of a pack, or a run of bytes.
"""

from __future__ import annotations

import math
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_nvcomp.engines.tensors import HostArray, host_array, is_transparent
from dcp_nvcomp.errors import ConfigurationError, FileMismatchError, MetadataError, ShapeMismatchError
from dcp_nvcomp.format.block_grid import BlockGrid, Box, RowStrip, Strip, element_span, row_strip
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import Shard, ShardIndex, described, matches
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, Record

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
    number: int  # its row in the block table
    record: Record  # the record that it is part of
    box: Box  # its box in the record
    start: int  # its first byte in the file
    stop: int  # its end in the file
    targets: list[Target]  # the targets that need it


@dataclass(frozen=True)
class Read:
    name: str
    footer: Footer
    start: int
    stop: int
    blocks: tuple[BlockRead, ...]
    wanted: Mapping[int, BlockRead]  # all blocks of the file that are wanted, by number


def locate(wanted_item: Wanted, footer: Footer) -> Target:
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
        Read(file.name, footer, read.start, read.stop, tuple(blocks[piece] for piece in read.pieces), wanted)
        for read in coalesce(spans, GAP_NBYTES, limit_nbytes)
    ]


@dataclass(frozen=True)
class ByteRange:
    """One read: a half-open range of a file, and which of the wanted pieces lie in it."""

    start: int
    stop: int
    pieces: tuple[int, ...]


def coalesce(pieces: Sequence[tuple[int, int]], gap_nbytes: int, limit_nbytes: int) -> list[ByteRange]:
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


class Conversions:
    def __init__(self) -> None:
        self._warned = False

    def check(self, fqn: str, saved: torch.dtype, wanted: torch.dtype) -> None:
        if saved == wanted or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"Key {fqn!r} was saved as {saved} and is converted to {wanted}; other keys may be converted too.",
            UserWarning,
            stacklevel=2,
        )


def refuse_shared_elements(tensor: torch.Tensor, fqn: str) -> None:
    """Refuse an expanded tensor: torch does so when it copies, but blocks may be rows, each of which has its own."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return
    if 0 in [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]:
        raise ConfigurationError(
            "Elements of the destination share their memory, as those of an expanded tensor do: load into a clone.",
            fqn=fqn,
        )


def part_of(tensor: torch.Tensor, region: Box) -> torch.Tensor | None:
    """Narrow a tensor to a region of it, by operations that every tensor subclass has; None if it is not inside."""
    inside = tensor.dim() == len(region.sizes) and all(
        offset + size <= limit for offset, size, limit in zip(region.offsets, region.sizes, tensor.shape, strict=True)
    )
    if not inside:
        return None
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def dense_part_of(tensor: torch.Tensor, region: Box) -> torch.Tensor | None:
    """Return a region of a tensor of another layout, such as a sparse one, as a strided one; None if it is outside."""
    whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
    if tensor.dim() != len(region.sizes) or not whole.contains(region):
        return None
    if all(size == length for size, length in zip(region.sizes, tensor.shape, strict=True)):
        return tensor.to_dense()
    part = tensor if tensor.layout == torch.sparse_coo else tensor.to_sparse(layout=torch.sparse_coo)
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        part = part.narrow_copy(dim, offset, size)
    return part.to_dense()


class Destination(ABC):
    """The place of a record's decoded blocks. Several threads place blocks, each block once."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def direct(self, strip: Strip) -> RowStrip | None:
        """Return the host memory of some blocks, as rows of bytes, to decode them there; None if there is none."""
        return None

    def direct_on_device(self, block: Box) -> torch.Tensor | None:
        """Return a block's memory as a uint8 tensor on the destination's device; None if it is not one run of bytes."""
        return None

    def direct_run_on_device(self, blocks: Sequence[Box]) -> torch.Tensor | None:
        """Return the memory of several blocks, as `direct_on_device`, if they lie there one after the other."""
        return None

    @abstractmethod
    def place(self, block: Box, data: torch.Tensor) -> None:
        """Copy the part of a decoded block that belongs here; `data` is 1-D, uint8, in C order."""

    def place_bytes(self, block: Box, data: U8) -> None:
        self.place(block, torch.from_numpy(data))


class Region(Destination):
    def __init__(self, box: Box, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self._box = box
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._dtype = dtype
        self._array: HostArray | None = None
        visible = tensor.dtype == dtype and is_transparent(tensor)
        if visible and tensor.device.type == "cpu":
            try:
                self._array = host_array(self._tensor)
            except RuntimeError:  # lazy bits
                visible = False
        self._visible = visible and not (self._array is None and (tensor.is_conj() or tensor.is_neg()))

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def direct(self, strip: Strip) -> RowStrip | None:
        if self._array is None or not self._box.contains(strip.box):
            return None
        if any(self._box.offsets):
            strip = strip._replace(box=strip.box.relative_to(self._box.offsets))
        return row_strip(self._array, strip)

    def direct_on_device(self, block: Box) -> torch.Tensor | None:
        if not self._visible or not self._box.contains(block):
            return None
        block = block.relative_to(self._box.offsets)
        if self._run is None:
            part = self._tensor[block.index]
            return part.reshape(-1).view(torch.uint8) if part.is_contiguous() else None
        first, stop = element_span(self._box.sizes, block)
        nbytes = self._dtype.itemsize
        return self._run[first * nbytes : stop * nbytes] if stop - first == block.elements else None

    def direct_run_on_device(self, blocks: Sequence[Box]) -> torch.Tensor | None:
        if not self._visible or self._run is None:
            return None
        begin = end = None
        for block in blocks:
            if not self._box.contains(block):
                return None
            first, stop = element_span(self._box.sizes, block.relative_to(self._box.offsets))
            if stop - first != block.elements or end not in (None, first):
                return None
            begin, end = first if begin is None else begin, stop
        assert begin is not None and end is not None
        nbytes = self._dtype.itemsize
        return self._run[begin * nbytes : end * nbytes]

    @cached_property
    def _run(self) -> torch.Tensor | None:
        """All of a contiguous tensor, as bytes: one operation of torch makes a block of it, and not several."""
        return self._tensor.reshape(-1).view(torch.uint8) if self._tensor.is_contiguous() else None

    def place_bytes(self, block: Box, data: U8) -> None:
        # thousands of small tensors are wanted whole
        if self._array is not None and block == self._box:
            np.copyto(self._array, data.view(self._array.dtype).reshape(self._array.shape))
        else:
            self.place(block, torch.from_numpy(data))

    def place(self, block: Box, data: torch.Tensor) -> None:
        wanted = self._box.intersect(block)
        if wanted is None:
            return
        into, out_of = wanted.relative_to(self._box.offsets).index, wanted.relative_to(block.offsets).index
        if self._array is not None and data.device.type == "cpu":
            # numpy and not torch: its copies stay on this thread
            np.copyto(self._array[into], data.numpy().view(self._array.dtype).reshape(block.sizes)[out_of])
        else:
            self._tensor[into].copy_(data.view(self._dtype).reshape(block.sizes)[out_of])


class PackMember(Destination):
    """A shard packed with others into one block, copied from it on the device that decoded the block."""

    def __init__(self, start: int, shape: Sequence[int], nbytes: int, region: Region) -> None:
        self._start = start
        self._stop = start + nbytes
        self._whole = Box((0,) * len(shape), tuple(shape))
        self._region = region

    @property
    def device(self) -> torch.device:
        return self._region.device

    def place(self, block: Box, data: torch.Tensor) -> None:
        self._region.place(self._whole, data[self._start : self._stop])


class Run(Destination):
    """A run of elements of a one-dimensional record: a bytes item, or a member of a pack."""

    def __init__(self, start: int, nbytes: int, element_nbytes: int, complete: Callable[[U8], None]) -> None:
        self._start = start * element_nbytes
        self._nbytes = nbytes
        self._width = element_nbytes
        self._complete = complete
        self._lock = threading.Lock()
        self._gathered: U8 | None = None
        self._missing = nbytes

    def place(self, block: Box, data: torch.Tensor) -> None:
        self.place_bytes(block, data.cpu().numpy())

    def place_bytes(self, block: Box, data: U8) -> None:
        begin = block.offsets[0] * self._width
        first, last = max(begin, self._start), min(begin + data.size, self._start + self._nbytes)
        part = data[first - begin : last - begin]
        if part.size == self._nbytes:
            self._complete(part)
            return
        with self._lock:
            if self._gathered is None:
                self._gathered = np.empty(self._nbytes, np.uint8)
            self._gathered[first - self._start : last - self._start] = part
            self._missing -= part.size
            done = self._missing == 0
        if done:
            self._complete(self._gathered)
