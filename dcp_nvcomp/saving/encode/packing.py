"""Small shards share a block: a record in the footer each, instead of a block and slices of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.codecs.base import BLOCK_NBYTES, CodecChain
from dcp_nvcomp.codecs.choose import sample_nbytes
from dcp_nvcomp.codecs.dtypes import ElementType
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda.slice_coders import ENCODE
from dcp_nvcomp.engines.tensors import host_values, torch_dtype
from dcp_nvcomp.format.blocks import BlockGrid
from dcp_nvcomp.format.record import KIND_PACK, Record
from dcp_nvcomp.saving.encode.choices import AutoChoice, RememberedChoices
from dcp_nvcomp.saving.encode.pending import Member, PendingRecord, Ready
from dcp_nvcomp.saving.encode.policy import CodecPolicy, spread_sample
from dcp_nvcomp.saving.encode.sources import AcceleratorSource, CudaPackSource, HostSource, Source

U8 = npt.NDArray[np.uint8]

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
        """Take a small tensor, without lazy bits if it is on a device."""
        if tensor.device.type == "cpu" and not on_cuda:
            # numpy's views take a fraction of the time of torch's, and there may be thousands of tensors
            data = np.ascontiguousarray(host_values(tensor)).reshape(-1).view(np.uint8)
            return self.add_bytes(member, data, member.record.element.name)
        pack, ready = self._pack_for(member, member.record.element.name, tensor.device, on_cuda=on_cuda)
        pack.tensors.append(tensor)
        return ready

    def add_bytes(self, member: Member, data: U8, dtype: str) -> list[Ready]:
        """Take a small shard's bytes in host memory."""
        pack, ready = self._pack_for(member, dtype, None, on_cuda=False)
        pack.arrays.append(data)
        return ready

    def flush(self) -> list[Ready]:
        """Return the packs that are not full."""
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
        """Return one record of all the parts, in one block."""
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
                source = AcceleratorSource(_joined(pack))
        else:
            joined = _joined(pack)
            chain = self._policy.tensor_chain(element, joined, on_cuda=False)
            source = AcceleratorSource(joined)
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
        named = replace(record, fqn=f"{KIND_PACK} {pack.members[0].record.fqn}")
        choice = AutoChoice(named, array, record.grid, self._remembered)
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
    """Return whole tensors as bytes, about `nbytes` of them or more: those in which a multiple of a step lies.

    Weighted by bytes, so that a lone scalar is not taken as representative.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    step = max(1, min(total // 4, total * total // (len(tensors) * nbytes)))
    some, start = [], 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        if -(-start // step) * step < stop:
            some.append(_flat(tensor))
        start = stop
    return some
