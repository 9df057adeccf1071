"""From DCP's write items to records: how each shard is described and cut, with which codec, encoded where."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.codecs.base import BLOCK_NBYTES, ELEMENT_TYPES, CodecChain, ElementType
from dcp_nvcomp.codecs.choose import CodecChooser, Judge, sample_nbytes
from dcp_nvcomp.codecs.transforms.derived import BASE_DTYPE, DERIVED
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda.coders import ENCODE
from dcp_nvcomp.engines.tensors import (
    HostArray,
    dtype_name,
    element_type,
    host_array,
    host_values,
    is_transparent,
    torch_dtype,
    without_lazy_bits,
)
from dcp_nvcomp.errors import CheckpointError, ShapeMismatchError
from dcp_nvcomp.format.block_grid import BlockGrid, box_grid, row_grid
from dcp_nvcomp.format.record import KIND_BYTES, KIND_PACK, KIND_TENSOR, KIND_TORCH_SAVE, Record
from dcp_nvcomp.saving.encode.choices import (
    AutoChoice,
    CodecPolicy,
    KeptChain,
    device_chain,
    is_derived,
    spread_sample,
)
from dcp_nvcomp.saving.encode.remembered import ChoiceMemory, RememberedChoices, choice_key
from dcp_nvcomp.saving.encode.sources import (
    AcceleratorSource,
    CudaPackSource,
    CudaSource,
    DerivedSource,
    HostSource,
    Member,
    PendingRecord,
    Ready,
    Source,
)

U8 = npt.NDArray[np.uint8]

_UINT8, _FLOAT32 = ELEMENT_TYPES["uint8"], ELEMENT_TYPES["float32"]


class RecordMaker:
    def __init__(
        self,
        chooser: CodecChooser,
        engine: EngineChoice,
        remembered: RememberedChoices,
        *,
        pack: bool,
        hashes: Mapping[MetadataIndex, str] = MappingProxyType({}),
        derived: Mapping[MetadataIndex, MetadataIndex] = MappingProxyType({}),
    ) -> None:
        self._engine, self._hashes, self._derived = engine, hashes, derived
        self._bases = frozenset(derived.values())
        self._base: _Base | None = None  # the record that was made last, if others may be derived from it
        self._policy = CodecPolicy(chooser)
        self._remembered = remembered
        self._judge = Judge()
        self._packer = Packer(self._policy, engine, remembered)
        self._packed_nbytes = SMALL_NBYTES if pack else 0

    def add(self, item: WriteItem, data: torch.Tensor | io.BytesIO) -> list[Ready]:
        fqn, (base, self._base) = item.index.fqn, (self._base, None)
        if isinstance(data, io.BytesIO):
            payload = np.frombuffer(data.getbuffer(), np.uint8)
            record = Record(KIND_BYTES, fqn, (payload.size,), (0,), (payload.size,), _UINT8)
            return self._add_payload(item.index, record, payload, "bytes")
        if data.is_meta:
            raise CheckpointError("A tensor on the meta device has no data to save.", fqn=fqn)
        region, element = _planned_region(item, data), element_type(data.dtype)
        if element is None or not is_transparent(data):
            payload = saved_payload(data)
            record = Record(KIND_TORCH_SAVE, fqn, (payload.size,), region.offsets, region.whole, _UINT8)
            return self._add_payload(item.index, record, payload, dtype_name(data.dtype))
        return self._add_tensor(item.index, region, element, data, base)

    def flush(self) -> list[Ready]:
        return self._packer.flush()

    def _add_payload(self, index: MetadataIndex, record: Record, payload: U8, dtype: str) -> list[Ready]:
        if 0 < payload.size < self._packed_nbytes:
            return self._packer.add_bytes(Member(index, record, payload.size), payload, "bytes")
        # `auto`, as the user's choice is for tensors
        grid = row_grid(record.shape, 1)
        return [_ready_later(index, record.in_blocks(grid), dtype, payload, None)]

    def _add_tensor(
        self, index: MetadataIndex, region: _Region, element: ElementType, tensor: torch.Tensor, base: _Base | None
    ) -> list[Ready]:
        device = tensor.device
        on_cuda = self._engine.on_cuda(device)
        on_host = not on_cuda and device.type == "cpu"
        nbytes = math.prod(region.shape) * element.nbytes
        is_small = 0 < nbytes < self._packed_nbytes
        content_hash = self._hashes.get(index, "") if self._hashes else ""
        if is_small or (on_host and self._policy.is_auto):
            record = Record(KIND_TENSOR, index.fqn, *region, element, content_hash=content_hash)
            if not is_small:
                return [self._in_host_memory(index, record, host_values(tensor), base)]
            data = tensor if on_host else without_lazy_bits(tensor)
            return self._packer.add_tensor(Member(index, record, nbytes), data, on_cuda=on_cuda)
        tensor, choice = without_lazy_bits(tensor), None
        if self._policy.is_auto and nbytes:
            key, remembered = choice_key(index.fqn, element, region.shape, region.offsets), self._remembered.device
            chain = device_chain(key, element, tensor, remembered, self._judge)
            choice = KeptChain(chain, key, remembered)
        else:
            chain = self._policy.tensor_chain(element, tensor, on_cuda=on_cuda)
        source = _source(tensor, on_cuda=on_cuda and self._engine.serves(device, chain, ENCODE))
        grid = _grid(region.shape, element, chain, source)
        # made once, with its blocks: making a record takes half a microsecond, and there may be thousands of tensors
        no_pack, first_block, no_base = None, 0, None
        record = Record(
            *(KIND_TENSOR, index.fqn, *region, element, no_pack),
            *(grid, chain, first_block, grid.block_count, no_base, content_hash),
        )
        return [(PendingRecord(record, element.name, (Member(index, record, nbytes),), choice), source)]

    def _in_host_memory(self, index: MetadataIndex, record: Record, array: HostArray, base: _Base | None) -> Ready:
        """Return a record for which `auto` chooses, or that is derived from the one before."""
        if base is not None and self._derived.get(index) == base.weight and is_derived(record, array, base.array):
            record = record.in_blocks(base.grid, DERIVED)
            members = (Member(index, record, record.uncompressed_nbytes),)
            return PendingRecord(record, record.element.name, members), DerivedSource(array, base.array)
        is_base = index in self._bases
        grid = _grid_of_base(record.shape) if is_base else box_grid(record.shape, record.element.nbytes)
        if is_base:
            self._base = _Base(index, array, grid)
        return _ready_later(index, record.in_blocks(grid), record.element.name, array, self._remembered.host)


class _Base(NamedTuple):
    """What the next record may be derived from."""

    weight: MetadataIndex
    array: HostArray
    grid: BlockGrid  # of both


def _grid_of_base(shape: tuple[int, ...]) -> BlockGrid:
    """Return the blocks of a bfloat16 tensor, smaller if those of float32 were too large for a task."""
    grid = box_grid(shape, ELEMENT_TYPES[BASE_DTYPE].nbytes)
    is_large = math.prod(map(min, grid.block_shape, shape)) * _FLOAT32.nbytes > BLOCK_NBYTES
    return box_grid(shape, _FLOAT32.nbytes) if is_large else grid


class _Region(NamedTuple):
    """Where a shard lies: its shape, its first element in the global tensor, and that one's shape."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...]


def _source(tensor: torch.Tensor, *, on_cuda: bool) -> Source:
    if on_cuda:
        return CudaSource((tensor,))
    return HostSource(host_array(tensor)) if tensor.device.type == "cpu" else AcceleratorSource(tensor)


def _grid(shape: tuple[int, ...], element: ElementType, chain: CodecChain, source: Source) -> BlockGrid:
    if source.has_boxes and chain.block_nbytes == BLOCK_NBYTES:
        return box_grid(shape, element.nbytes)
    return row_grid(shape, element.nbytes, chain.block_nbytes)


def _ready_later(
    index: MetadataIndex, record: Record, dtype: str, array: HostArray, remembered: ChoiceMemory | None
) -> Ready:
    """Return a record in host memory, whose chain `auto` chooses when it is encoded."""
    assert record.grid is not None
    choice = AutoChoice(record, array, record.grid, remembered)
    members = (Member(index, record, record.uncompressed_nbytes),)
    return PendingRecord(record, dtype, members, choice), HostSource(array)


def _planned_region(item: WriteItem, tensor: torch.Tensor) -> _Region:
    """Return where a shard lies; check that its shape is the planned one."""
    planned = item.tensor_data
    assert planned is not None
    shape, box = tuple(tensor.shape), planned.chunk
    if shape != tuple(box.sizes):
        raise ShapeMismatchError(
            f"The planner planned a shard of shape {list(box.sizes)} but resolved it to one of {list(shape)}.",
            fqn=item.index.fqn,
        )
    return _Region(shape, tuple(box.offsets), tuple(planned.size))


def saved_payload(tensor: torch.Tensor) -> U8:
    """Return a tensor whose storage is hidden as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(tensor.detach(), buffer)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


# Records below this size share blocks.
SMALL_NBYTES = 64 << 10


@dataclass(slots=True)
class _Pack:
    """A pack that is being filled: its parts are all bytes in host memory, or all tensors on one device."""

    element: ElementType
    dtype: str
    on_cuda: bool
    arrays: list[U8] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    nbytes: int = 0


class Packer:
    """Gathers small shards of a kind until they fill a block."""

    def __init__(self, policy: CodecPolicy, engine: EngineChoice, remembered: RememberedChoices) -> None:
        self._policy = policy
        self._engine = engine
        self._remembered = remembered
        self._packs: dict[tuple[str, str, torch.device | None, bool], _Pack] = {}

    def add_tensor(self, member: Member, tensor: torch.Tensor, *, on_cuda: bool) -> list[Ready]:
        if tensor.device.type == "cpu" and not on_cuda:
            # numpy's views take a fraction of the time of torch's, and there may be thousands of tensors
            data = np.ascontiguousarray(host_values(tensor)).reshape(-1).view(np.uint8)
            return self.add_bytes(member, data, member.record.element.name)
        pack, ready = self._pack_for(member, member.record.element.name, tensor.device, on_cuda=on_cuda)
        pack.tensors.append(tensor)
        return ready

    def add_bytes(self, member: Member, data: U8, dtype: str) -> list[Ready]:
        pack, ready = self._pack_for(member, dtype, None, on_cuda=False)
        pack.arrays.append(data)
        return ready

    def flush(self) -> list[Ready]:
        packs = [self._closed(pack) for pack in self._packs.values()]
        self._packs.clear()
        return packs

    def _pack_for(
        self, member: Member, dtype: str, device: torch.device | None, *, on_cuda: bool
    ) -> tuple[_Pack, list[Ready]]:
        record, nbytes = member.record, member.nbytes
        key = (record.kind, record.element.name, device, on_cuda)
        pack, ready = self._packs.get(key), []
        if pack is not None and pack.nbytes + nbytes > BLOCK_NBYTES:
            ready.append(self._closed(pack))
            pack = None
        if pack is None:
            pack = self._packs[key] = _Pack(record.element, dtype, on_cuda)
        pack.members.append(member)
        pack.nbytes += nbytes
        return pack, ready

    def _closed(self, pack: _Pack) -> Ready:
        element, sampled_nbytes = pack.element, sample_nbytes(pack.nbytes)
        source: Source
        if pack.arrays:
            return self._closed_on_host(pack)
        if pack.on_cuda:
            some = torch.cat(_some_of(pack.tensors, sampled_nbytes)).view(torch_dtype(element))
            chain = self._policy.chain(element, spread_sample(some, sampled_nbytes), pack.nbytes, on_cuda=True)
            if self._engine.serves(pack.tensors[0].device, chain, ENCODE):
                source = CudaPackSource(pack.tensors)
            else:
                source = AcceleratorSource(_joined(pack), pack.tensors)
        else:
            joined = _joined(pack)
            chain = self._policy.tensor_chain(element, joined, on_cuda=False)
            source = AcceleratorSource(joined, pack.tensors)
        return PendingRecord(_pack_record(pack, chain), pack.dtype, tuple(pack.members)), source

    def _closed_on_host(self, pack: _Pack) -> Ready:
        data = np.concatenate(pack.arrays)
        array = data.reshape(-1, pack.element.nbytes)
        if not self._policy.is_auto:
            chain = self._policy.chain(pack.element, data[: sample_nbytes(pack.nbytes)], pack.nbytes, on_cuda=False)
            return PendingRecord(_pack_record(pack, chain), pack.dtype, tuple(pack.members)), HostSource(array)
        record = _pack_record(pack, None)
        assert record.grid is not None
        # packs have no name, but those of one save to the next hold the same shards
        named = record._replace(fqn=f"{KIND_PACK} {pack.members[0].record.fqn}")
        choice = AutoChoice(named, array, record.grid, self._remembered.host)
        return PendingRecord(record, pack.dtype, tuple(pack.members), choice), HostSource(array)


def _pack_record(pack: _Pack, chain: CodecChain | None) -> Record:
    shape = (pack.nbytes // pack.element.nbytes,)
    grid = BlockGrid(shape, shape)
    return Record(KIND_PACK, "", shape, (0,), shape, pack.element, None, grid, chain, block_count=1)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _joined(pack: _Pack) -> torch.Tensor:
    return torch.cat([_flat(tensor) for tensor in pack.tensors]).view(torch_dtype(pack.element))


def _some_of(tensors: Sequence[torch.Tensor], nbytes: int) -> list[torch.Tensor]:
    """Return whole tensors as bytes, about `nbytes` or more, weighted by bytes, so that no scalar stands for all."""
    total = sum(tensor.nbytes for tensor in tensors)
    step = max(1, min(total // 4, total * total // (len(tensors) * nbytes)))
    some, start = [], 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        if -(-start // step) * step < stop:
            some.append(_flat(tensor))
        start = stop
    return some
