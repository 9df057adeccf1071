"""Blocks to encoded blocks, a batch at a time on a device; the blocks may be of any chains.

inspect   each block's CRC and signs
split     blocks --> planes in scratch memory (without planes: a copy, as coders want aligned input)
code      slices of coded planes --> frames
gather    stored planes and frames --> one contiguous run, which one copy takes to the host; frames of our own kernels
          are written there in the first place
check     the run --> blocks again, whose CRCs must be those of the blocks; and what arrived on the host

Encoders on GPUs have coded some blocks to wrong bytes, depending on the batch. A checkpoint is the only copy of what
was trained, so `check` is the rule; it reads what the copy to the host reads, and so covers all steps before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import BlockRow, CodecChain, EncodedBlock, checksum
from dcp_nvcomp.engines.cuda.batches import (
    I64,
    BatchLayout,
    BatchLayouts,
    Layouts,
    Pieces,
    block_table,
    copy_table,
    padded_nbytes,
    starts_of,
)
from dcp_nvcomp.engines.cuda.decode import U32, BatchDecoder, EncodedBlocks, read_crcs, start_crcs
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.slice_coders import DeviceCoders, SliceFrames

# Tables, results and the allocator's rounding, for each block.
_OVERHEAD_NBYTES = 2048
# The check begins each block at a multiple of this, and spoils one byte in so many of what was there.
_MARK_NBYTES = 512
# Threads that compute the CRCs of what arrived, each of so much at least.
_CRC_THREADS = 4
_CRC_SHARE_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """One block to encode."""

    tensors: tuple[Tensor, ...]
    chain: CodecChain  # its codec chain; ANS names the version of nvCOMP that is here
    # what the work waits for, so that the elements are there; None for the current stream
    ready: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        if len(self.tensors) == 1:  # of almost all blocks, and a batch has hundreds
            return self.tensors[0].nbytes
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_run(self) -> bool:
        """True if the block is one contiguous run in memory; else encoding makes a copy that is."""
        return len(self.tensors) == 1 and self.tensors[0].is_contiguous()

    def bytes(self, empty: Callable[[int], Tensor]) -> Tensor:
        """Return the block as a contiguous uint8 tensor: a view if possible, else a copy."""
        if self.is_run:
            (tensor,) = self.tensors
            if tensor.dtype == torch.uint8 and tensor.dim() == 1:
                return tensor
            return tensor.reshape(-1).view(torch.uint8)
        copy, start = empty(self.nbytes), 0
        for tensor in self.tensors:
            stop = start + tensor.numel() * tensor.element_size()
            copy[start:stop].view(tensor.dtype).reshape(tensor.shape).copy_(tensor)
            start = stop
        return copy


@dataclass(frozen=True)
class EncodedBatch:
    """The encoded blocks of a batch."""

    blocks: list[EncodedBlock]  # in the order of the jobs
    wrong: list[int]  # the numbers of those that do not decode to their block


class BatchEncoder:
    """Encodes batches on a device."""

    def __init__(self, device: Device, coders: DeviceCoders, decoder: BatchDecoder | None) -> None:
        self._device = device
        self._coders = coders
        self._decoder = decoder
        self._layouts = Layouts(every_plane=True)
        self._batches = BatchLayouts(every_plane=True)

    def costs_nbytes(self, jobs: Sequence[EncodeJob]) -> list[int]:
        """Return the device memory that encoding each block takes, in addition to the block."""
        known: dict[tuple[int, int, bool], int] = {}
        costs = []
        for job in jobs:
            key = id(job.chain), job.nbytes, job.is_run
            if key not in known:
                known[key] = self._cost_nbytes(job)
            costs.append(known[key])
        return costs

    def _cost_nbytes(self, job: EncodeJob) -> int:
        chain, nbytes = job.chain, job.nbytes
        layout = self._layouts.get(chain, nbytes, 0)
        cost = layout.scratch_nbytes + chain.max_encoded_nbytes(nbytes) + _OVERHEAD_NBYTES
        if not job.is_run:
            cost += nbytes
        if chain.coder is not None and layout.slice_nbytes:
            lengths = layout.lengths[layout.coded]
            cost += self._coders.encode_nbytes(chain.coder, lengths)
            if self._decoder is not None:
                cost += self._coders.decode_nbytes(chain.coder, lengths)
        return cost if self._decoder is None else cost + nbytes

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> EncodedBatch:
        # those that are split into planes first: the kernels' tables count rows from 0
        order = sorted(range(len(jobs)), key=[job.chain.array_to_bytes.is_plain for job in jobs].__getitem__)
        encoded, wrong = self._encode([jobs[index] for index in order], out)
        if order == sorted(order):
            return EncodedBatch(encoded, sorted(wrong))
        in_order = dict(zip(order, encoded, strict=True))
        return EncodedBatch([in_order[index] for index in range(len(jobs))], sorted(order[at] for at in wrong))

    def _encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> tuple[list[EncodedBlock], set[int]]:
        after = {job.ready for job in jobs if job.ready is not None}
        with self._device.session([tensor for job in jobs for tensor in job.tensors], tuple(after)):
            runs = [job.bytes(self._device.arena.empty) for job in jobs]
            data = np.array([run.data_ptr() for run in runs], np.int64)
            nbytes = np.array([run.numel() for run in runs], np.int64)
            layout = self._batches.get([job.chain for job in jobs], nbytes, np.zeros_like(nbytes))
            results = torch.zeros((3, len(jobs)), dtype=torch.int32, device=self._device.torch_device)
            crc, seen, flags = results.unbind()
            scratch, bases = self._split(layout, data, (crc, seen, flags))
            coded = self._code(layout, scratch, bases)
            crcs, _, all_flags = results.cpu().numpy().view(np.uint32)
            layout = self._batches.get(layout.chains, nbytes, all_flags.astype(np.int64))
            run, stored_nbytes, starts = self._gather(layout.pieces, bases, coded)
            self._device.copy_out(run, out[: run.numel()])
            bounds = starts[layout.pieces.bounds]
            encoded_crcs = start_crcs(self._device, bounds[:-1] + run.data_ptr(), bounds[1:] - bounds[:-1])
            slice_nbytes = stored_nbytes[layout.pieces.coded]
            wrong = self._check(layout, slice_nbytes, crcs, run, bounds[:-1], scratch)
            columns = bounds[:-1], bounds[1:], layout.flags, read_crcs(encoded_crcs), crcs, nbytes
        sizes, slices = slice_nbytes.tolist(), layout.slice_bounds
        encoded = [
            EncodedBlock(out[start:stop], BlockRow(flag, tuple(sizes[first:last]), encoded_crc, crc), length)
            for start, stop, flag, encoded_crc, crc, length, first, last in zip(
                *(column.tolist() for column in columns), slices[:-1], slices[1:], strict=True
            )
        ]
        if self._decoder is not None:
            wrong |= self._arrived_wrong(encoded)
        return encoded, wrong

    def _check(
        self, layout: BatchLayout, slice_nbytes: I64, crcs: U32, run: Tensor, starts: I64, scratch: Tensor
    ) -> set[int]:
        """Decode the run again; return the blocks that come out otherwise. `scratch` is overwritten."""
        if self._decoder is None:
            return set()
        places = starts_of(-(-layout.nbytes // _MARK_NBYTES) * _MARK_NBYTES)
        memory = self._device.arena.empty(int(places[-1]))
        # an earlier batch may have left the very blocks here: kernels that write nothing, or leave a tile out, must not
        # pass either. One byte in 512 is enough, and moves a sixteenth of what clearing all of it would
        memory[::_MARK_NBYTES].bitwise_not_()
        blocks = EncodedBlocks(self._decoder.layout(layout), places[:-1] + memory.data_ptr(), slice_nbytes, crcs)
        # it may hold the very planes that should come out: a decoder that leaves a slice untouched must not pass
        scratch[: int(blocks.layout.scratch_starts[-1])].bitwise_not_()
        return {*self._decoder.decode_on_device(blocks, run, starts, scratch)}

    def _arrived_wrong(self, encoded: Sequence[EncodedBlock]) -> set[int]:
        """Return the blocks that are not in host memory as they were checked: neither copy nor CRCs are believed."""
        crcs = _checksums([block.data for block in encoded])
        return {at for at, crc in enumerate(crcs) if crc != encoded[at].row.encoded_crc}

    def _split(self, layout: BatchLayout, data: I64, results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, I64]:
        """Inspect the blocks and bring them into scratch memory; returns it, and where each block's pieces begin."""
        device, count = self._device, int((~layout.is_plain).sum())
        crc, seen, flags = results
        scratch = device.arena.empty(int(layout.scratch_starts[-1]))
        # stored as it is, a block needs no scratch memory: its piece is the block itself
        bases = np.where(layout.scratch_nbytes > 0, layout.scratch_starts[:-1] + scratch.data_ptr(), data)
        columns = data, layout.nbytes, layout.widths, layout.packs, layout.planes + bases[:, np.newaxis]
        device.kernels.inspect(block_table(*columns), crc, seen)
        device.kernels.split(block_table(*(column[:count] for column in columns)), seen[:count], flags[:count])
        copied = np.flatnonzero(layout.scratch_nbytes[count:]) + count
        if copied.size:
            nbytes = layout.nbytes[copied]
            device.kernels.copy(copy_table(data[copied], bases[copied], nbytes, np.zeros_like(nbytes)))
        return scratch, bases

    def _code(self, layout: BatchLayout, scratch: Tensor, bases: I64) -> list[tuple[I64, SliceFrames]]:
        """Start to encode all slices, which are the same whatever the flags; for each coder which of the slices."""
        pieces = layout.pieces
        slices = np.flatnonzero(pieces.coded)
        places, lengths = (bases[pieces.block] + pieces.places)[slices] - scratch.data_ptr(), pieces.lengths[slices]
        coded = []
        for coder, number in layout.coders.items():
            which = np.flatnonzero(layout.coder_of_piece[slices] == number)
            if which.size:
                coded.append((which, self._coders.encode(coder, scratch, places[which], lengths[which])))
        return coded

    def _gather(self, pieces: Pieces, bases: I64, coded: Sequence[tuple[I64, SliceFrames]]) -> tuple[Tensor, I64, I64]:
        """Bring all pieces into one run; returns it, their stored lengths and their starts."""
        sources, stored_nbytes = bases[pieces.block] + pieces.places, pieces.lengths.copy()
        slices = np.flatnonzero(pieces.coded)
        for which, frames in coded:
            nbytes, which = frames.nbytes(), slices[which]
            framed = nbytes < stored_nbytes[which]
            stored_nbytes[which] = nbytes
            sources[which[framed]] = frames.addresses[framed]
        room = padded_nbytes(stored_nbytes)
        starts = starts_of(room)
        run = self._device.arena.empty(int(starts[-1]))
        targets, there = starts[:-1] + run.data_ptr(), sources != 0
        nbytes = stored_nbytes[there]
        self._device.kernels.copy(copy_table(sources[there], targets[there], nbytes, room[there] - nbytes))
        for which, frames in coded:
            frames.write(targets[slices[which]])
        return run, stored_nbytes, starts


def _checksums(blocks: Sequence[memoryview]) -> list[int]:
    """Return the CRCs of blocks: one core computes them at a fraction of the rate at which they arrive."""
    threads = min(_CRC_THREADS, len(blocks), -(-sum(block.nbytes for block in blocks) // _CRC_SHARE_NBYTES))
    if threads < 2:
        return [checksum(block) for block in blocks]
    share = -(-len(blocks) // threads)
    parts = [blocks[start : start + share] for start in range(0, len(blocks), share)]

    def crcs_of(part: Sequence[memoryview]) -> list[int]:
        return [checksum(block) for block in part]

    with ThreadPoolExecutor(threads - 1) as pool:
        try:
            others = [pool.submit(crcs_of, part) for part in parts[1:]]
        except RuntimeError:  # the interpreter ends, while the last asynchronous save is written
            return crcs_of(blocks)
        return crcs_of(parts[0]) + [crc for other in others for crc in other.result()]
