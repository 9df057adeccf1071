"""From DCP's write items to records: what each shard's footer row says, how it is cut, with which codec, encoded where.

WriteItem + resolved data  --RecordMaker.add-->  records ready to encode; small ones gather in packs until `flush`
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.codecs.base import BLOCK_NBYTES, CodecChain
from dcp_nvcomp.codecs.choose import CodecChooser, parse_codec, sample_nbytes
from dcp_nvcomp.codecs.dtypes import ELEMENT_TYPES, ElementType
from dcp_nvcomp.codecs.registry import check_chain
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda.engine import stamped_chain
from dcp_nvcomp.engines.tensors import (
    element_type,
    host_array,
    is_transparent,
    torch_dtype,
    without_lazy_bits,
)
from dcp_nvcomp.errors import CheckpointError, ShapeMismatchError
from dcp_nvcomp.format.blocks import BlockGrid, default_block_shape
from dcp_nvcomp.format.footer import KIND_BYTES, KIND_PACK, KIND_TENSOR, KIND_TORCH_SAVE
from dcp_nvcomp.saving.encode.sources import AcceleratorSource, CudaPackSource, CudaSource, HostSource, Source

__all__ = ["LARGE_NBYTES", "SMALL_NBYTES", "Member", "PendingRecord", "RecordMaker", "saved_payload", "spread_sample"]

U8 = npt.NDArray[np.uint8]

# Records below this share a block with others: a row in the footer instead of a block and slices of their own.
SMALL_NBYTES = 64 << 10
# Records from here on begin at multiples of 4096 in the file.
LARGE_NBYTES = 1 << 20

_UINT8 = ELEMENT_TYPES["uint8"]
# Same-width views for packed bytes; 16-byte elements have no integer of their width.
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True)
class Member:
    """What `.metadata` will point to: one write item, and its footer row if it lies in a pack.

    Attributes:
        index: DCP's index of the item.
        row: its footer row but for `pack`; empty for the record's own item.
        elements: elements it has.
        nbytes: its size.
    """

    index: MetadataIndex
    row: dict[str, Any]
    elements: int
    nbytes: int


@dataclass(frozen=True)
class PendingRecord:
    """A record ready to be encoded, but for its elements: those are in a `Source`, which may be dropped earlier.

    Attributes:
        row: its footer row, without the codec.
        element: its element type.
        dtype: dtype name for stats (`bytes` for Python objects).
        grid: its blocks.
        chain: its codec chain.
        members: the items in it: one, or those of a pack.
        nbytes: its size.
    """

    row: dict[str, Any]
    element: ElementType
    dtype: str
    grid: BlockGrid
    chain: CodecChain
    members: tuple[Member, ...]
    nbytes: int

    @property
    def is_pack(self) -> bool:
        """Whether the members have footer rows of their own."""
        return self.row.get("kind") == KIND_PACK


Ready = tuple[PendingRecord, Source]


@dataclass
class _OpenPack:
    element: ElementType
    dtype: str
    parts: list[U8 | torch.Tensor] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    nbytes: int = 0


class RecordMaker:
    """Makes records of one data file's items.

    Args:
        chooser: picks the codec chain.
        engine: picks the engine.
        pack: whether small items may share a block.
    """

    def __init__(self, chooser: CodecChooser, engine: EngineChoice, *, pack: bool) -> None:
        self._chooser = chooser
        self._host_chooser = parse_codec("auto")
        self._engine = engine
        self._pack = pack
        self._checked: set[tuple[str, str]] = set()
        self._open: dict[tuple[str, str, str], _OpenPack] = {}

    def add(self, item: WriteItem, data: torch.Tensor | io.BytesIO) -> list[Ready]:
        """Take an item.

        Args:
            item: the write item.
            data: what the planner resolved it to.

        Returns:
            The records that are ready now: none while it waits in a pack.

        Raises:
            ShapeMismatchError: the tensor is not of the shape that was planned.
            CheckpointError: the tensor has no data.
        """
        fqn = item.index.fqn
        if isinstance(data, io.BytesIO):
            payload = np.frombuffer(data.getbuffer(), np.uint8)
            return self._add_host(item, {"kind": KIND_BYTES, "fqn": fqn, "shape": [payload.size]}, payload, "bytes")
        if data.is_meta:
            raise CheckpointError("A tensor on the meta device has no data to save.", fqn=fqn)
        row = _row(item, data)
        if not is_transparent(data):
            payload = saved_payload(data)
            row = {**row, "kind": KIND_TORCH_SAVE, "shape": [payload.size]}
            row.setdefault("offsets", [0] * data.dim())
            row.setdefault("global_shape", list(data.shape))
            return self._add_host(item, row, payload, str(data.dtype).removeprefix("torch."))
        return self._add_tensor(item, row, without_lazy_bits(data))

    def flush(self) -> list[Ready]:
        """The packs that are still open."""
        packs = [self._close(pack) for pack in self._open.values() if pack.members]
        self._open.clear()
        return packs

    def _add_host(self, item: WriteItem, row: dict[str, Any], payload: U8, dtype: str) -> list[Ready]:
        member = Member(item.index, row, payload.size, payload.size)
        if self._pack and 0 < payload.size < SMALL_NBYTES:
            return self._add_small((row["kind"], "uint8", "cpu"), _UINT8, "bytes", member, payload)
        chain = self._host_chooser.choose(_UINT8, _sample_bytes(payload), payload.size)
        return [(_record(row, _UINT8, dtype, chain, member), HostSource(payload))]

    def _add_tensor(self, item: WriteItem, row: dict[str, Any], tensor: torch.Tensor) -> list[Ready]:
        element = element_type(tensor.dtype)
        assert element is not None
        nbytes = tensor.numel() * element.nbytes
        member = Member(item.index, row, tensor.numel(), nbytes)
        if self._pack and 0 < nbytes < SMALL_NBYTES:
            on_host = tensor.device.type == "cpu" and not self._engine.on_cuda(tensor.device)
            part = host_array(_flat(tensor)) if on_host else tensor
            return self._add_small((KIND_TENSOR, element.name, str(tensor.device)), element, element.name, member, part)
        chain, source = self._encoded_where(tensor, element)
        return [(_record(row, element, element.name, chain, member), source)]

    def _add_small(
        self, key: tuple[str, str, str], element: ElementType, dtype: str, member: Member, part: U8 | torch.Tensor
    ) -> list[Ready]:
        pack = self._open.get(key)
        ready = []
        if pack is not None and pack.nbytes + member.nbytes > BLOCK_NBYTES:
            ready.append(self._close(pack))
            pack = None
        if pack is None:
            pack = self._open[key] = _OpenPack(element, dtype)
        pack.parts.append(part)
        pack.members.append(member)
        pack.nbytes += member.nbytes
        return ready

    def _close(self, pack: _OpenPack) -> Ready:
        """One record of all the parts, in one block."""
        elements = pack.nbytes // pack.element.nbytes
        row = {"kind": KIND_PACK, "shape": [elements]}
        tensors = [part for part in pack.parts if isinstance(part, torch.Tensor)]
        source: Source
        if tensors and self._engine.on_cuda(tensors[0].device):
            some = torch.cat(_some_of(tensors, sample_nbytes(pack.nbytes))).view(torch_dtype(pack.element))
            sample = spread_sample(some, sample_nbytes(pack.nbytes))
            chain, source = self._cuda_chain(pack.element, sample, pack.nbytes), CudaPackSource(tensors)
        elif tensors:
            joined = torch.cat([_flat(tensor) for tensor in tensors]).view(torch_dtype(pack.element))
            chain, source = self._encoded_where(joined, pack.element)
        else:
            array = np.concatenate(pack.parts)
            chain = self._host_chain(pack.element, array[: sample_nbytes(pack.nbytes)], pack.nbytes)
            source = HostSource(array.view(_WORDS[pack.element.nbytes]))
        return _pack_record(row, pack, chain, elements), source

    def _encoded_where(self, tensor: torch.Tensor, element: ElementType) -> tuple[CodecChain, Source]:
        nbytes = tensor.numel() * tensor.element_size()
        sample = spread_sample(tensor, sample_nbytes(nbytes)) if nbytes else np.zeros(0, np.uint8)
        if self._engine.on_cuda(tensor.device):
            return self._cuda_chain(element, sample, nbytes), CudaSource((tensor,))
        chain = self._host_chain(element, sample, nbytes)
        return chain, AcceleratorSource(tensor) if tensor.device.type != "cpu" else HostSource(host_array(tensor))

    def _cuda_chain(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        return stamped_chain(self._choose(element, sample, nbytes))

    def _choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        """The chooser's chain; one that could not be read again is refused before anything depends on it."""
        chain = self._chooser.choose(element, sample, nbytes)
        described = repr(chain), element.name
        if described not in self._checked:
            check_chain(chain, element)
            self._checked.add(described)
        return chain

    def _host_chain(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        """ANS runs on the GPU alone; what of such a save lies in host memory gets `auto`'s codec."""
        chain = self._choose(element, sample, nbytes)
        return self._host_chooser.choose(element, sample, nbytes) if chain.needs_gpu else chain


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _some_of(tensors: Sequence[torch.Tensor], nbytes: int) -> list[torch.Tensor]:
    """Whole tensors as bytes, about `nbytes` of them or more: those in which a multiple of a step lies.

    By bytes and not by number, so that one scalar among large tensors does not speak for all of them.
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


def _sample_bytes(payload: U8) -> U8:
    step = max(payload.size // 4, 1)
    count = sample_nbytes(payload.size) // 4
    return np.concatenate([payload[at : at + count] for at in range(0, payload.size, step)][:4] or [payload])


def _row(item: WriteItem, tensor: torch.Tensor) -> dict[str, Any]:
    """The footer row of a tensor; checks that it is of the planned shape."""
    planned = item.tensor_data
    assert planned is not None
    shape, whole, offsets = list(tensor.shape), list(planned.size), list(planned.chunk.offsets)
    if shape != list(planned.chunk.sizes):
        raise ShapeMismatchError(
            f"The planner planned a shard of shape {list(planned.chunk.sizes)} but resolved it to one of {shape}.",
            fqn=item.index.fqn,
        )
    row: dict[str, Any] = {"fqn": item.index.fqn, "shape": shape}
    if any(offsets):
        row["offsets"] = offsets
    if whole != shape:
        row["global_shape"] = whole
    return row


def _grid(shape: Sequence[int], element: ElementType, chain: CodecChain) -> BlockGrid:
    return BlockGrid(tuple(shape), default_block_shape(shape, element.nbytes, chain.block_nbytes))


def _record(row: dict[str, Any], element: ElementType, dtype: str, chain: CodecChain, member: Member) -> PendingRecord:
    grid = _grid(row["shape"], element, chain)
    row = {**row, "dtype": element.name, "block_shape": list(grid.block_shape)}
    return PendingRecord(row, element, dtype, grid, chain, (member,), member.nbytes)


def _pack_record(row: dict[str, Any], pack: _OpenPack, chain: CodecChain, elements: int) -> PendingRecord:
    grid = BlockGrid((elements,), (elements,))
    row = {**row, "dtype": pack.element.name, "block_shape": [elements]}
    return PendingRecord(row, pack.element, pack.dtype, grid, chain, tuple(pack.members), pack.nbytes)


def saved_payload(tensor: torch.Tensor) -> U8:
    """A tensor whose storage is hidden, as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(tensor.detach(), buffer)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def spread_sample(tensor: torch.Tensor, nbytes: int, pieces: int = 4) -> U8:
    """Bytes from several places of a tensor, to measure codecs on.

    Args:
        tensor: without lazy bits, on any device.
        nbytes: how much to take in all.
        pieces: from how many places.

    Returns:
        At most about `nbytes` bytes, whole elements, on the host.
    """
    width = tensor.element_size()
    if tensor.numel() * width <= nbytes:
        parts = [tensor.reshape(-1)]
    elif tensor.is_contiguous():
        flat, count = tensor.view(-1), nbytes // pieces // width
        step = (tensor.numel() - count) // max(pieces - 1, 1)
        parts = [flat[at * step : at * step + count] for at in range(pieces)]
    else:
        # boxes of a strided tensor, so that nothing of its full size is ever copied
        places = sorted({tensor.shape[0] * at // pieces for at in range(pieces)})
        parts = [_leading(tensor[at:], nbytes // pieces // width) for at in places]
    return np.concatenate([host_array(part.cpu().contiguous()).view(np.uint8) for part in parts])


def _leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` elements, and at least one, from the start of a strided tensor, as a run."""
    for dim in range(tensor.dim()):
        inner = math.prod(tensor.shape[dim + 1 :])
        tensor = tensor.narrow(dim, 0, max(1, min(tensor.shape[dim], count // inner)))
    return tensor.reshape(-1)
