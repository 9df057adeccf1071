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
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import FLAG_NEGATIVE, FLAG_PACKED_REST, CodecChain, checksum
from dcp_nvcomp.codecs.encoded_run import EncodedRun
from dcp_nvcomp.engines.cuda.batches import (
    I64,
    BatchLayout,
    BatchLayouts,
    BlockCosts,
    Layouts,
    block_table,
    copy_table,
    lengths_of,
    padded_nbytes,
    starts_of,
)
from dcp_nvcomp.engines.cuda.decode import BatchDecoder, EncodedBlocks, read_crcs, start_crcs
from dcp_nvcomp.engines.cuda.decode_jobs import U32
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.slice_coders import DeviceCoders, SliceFrames

# Tables, results and the allocator's rounding, for each block.
_OVERHEAD_NBYTES = 2048
# The check begins each block at a multiple of this, and spoils one byte in so many of what was there.
_MARK_NBYTES = 512
# Threads that compute the CRCs of what arrived, each of so much at least.
_CRC_THREADS = 4
_CRC_SHARE_NBYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class EncodeJob:
    """One block to encode, or several that lie one after the other in memory."""

    tensors: tuple[Tensor, ...]
    chain: CodecChain  # its codec chain; ANS names the version of nvCOMP that is here
    # what the work waits for, so that the elements are there; None for the current stream
    ready: torch.cuda.Event | None = None
    # of several blocks, where each begins in the only tensor, which is contiguous and uint8, and the end of the last
    bounds: I64 | None = None

    @property
    def count(self) -> int:
        return 1 if self.bounds is None else self.bounds.size - 1

    @property
    def nbytes(self) -> int:
        return int(self.block_nbytes.sum())

    @cached_property
    def block_nbytes(self) -> I64:
        """The size of each block."""
        if self.bounds is None:
            return np.array([sum(tensor.nbytes for tensor in self.tensors)])
        return lengths_of(self.bounds)

    @property
    def is_run(self) -> bool:
        """True if its blocks are one contiguous run in memory; else encoding makes a copy that is."""
        return len(self.tensors) == 1 and self.tensors[0].is_contiguous()

    def part(self, first: int, stop: int) -> EncodeJob:
        """Return some of the blocks."""
        if (first, stop) == (0, self.count):
            return self
        assert self.bounds is not None
        return replace(self, bounds=self.bounds[first : stop + 1])

    def single(self, at: int) -> EncodeJob:
        """Return one of the blocks, as a job that has no other."""
        if self.bounds is None:
            return self
        start, stop = self.bounds[at : at + 2].tolist()
        return EncodeJob((self.tensors[0][start:stop],), self.chain, self.ready)

    def starts(self, address: int) -> I64:
        """Return where each block begins, if the run begins at this address."""
        return np.array([address]) if self.bounds is None else self.bounds[:-1] + address

    def copy(self, empty: Callable[[int], Tensor]) -> Tensor:
        """Return a copy of the only block that is a contiguous run."""
        assert self.bounds is None
        copy, start = empty(self.nbytes), 0
        for tensor in self.tensors:
            stop = start + tensor.numel() * tensor.element_size()
            copy[start:stop].view(tensor.dtype).reshape(tensor.shape).copy_(tensor)
            start = stop
        return copy


@dataclass(frozen=True)
class EncodedBatch:
    """The encoded blocks of a batch."""

    run: EncodedRun  # in the order of the jobs
    wrong: list[int]  # the numbers of those that do not decode to their block


class BatchEncoder:
    """Encodes batches on a device."""

    def __init__(self, device: Device, coders: DeviceCoders, decoder: BatchDecoder | None) -> None:
        self._device = device
        self._coders = coders
        self._decoder = decoder
        self._layouts = Layouts(every_plane=True)
        self._batches = BatchLayouts(every_plane=True)
        self._costs = BlockCosts(self._cost_nbytes)

    def costs_nbytes(self, jobs: Sequence[EncodeJob]) -> list[int]:
        """Return the device memory that encoding each block takes, in addition to the block."""
        nbytes = np.concatenate([job.block_nbytes for job in jobs])
        costs = self._costs.get(self._layout(jobs, nbytes))
        if not all(job.is_run for job in jobs):
            is_run = np.repeat([job.is_run for job in jobs], [job.count for job in jobs])
            costs = np.where(is_run, costs, costs + nbytes)
        found: list[int] = costs.tolist()
        return found

    def _layout(self, jobs: Sequence[EncodeJob], nbytes: I64) -> BatchLayout:
        """Return the layout before any flags are known."""
        return self._batches.get(tuple([(job.chain, job.count) for job in jobs]), nbytes, np.zeros_like(nbytes))

    def _cost_nbytes(self, chain: CodecChain, nbytes: int, flags: int) -> int:
        """Return what a block costs that is one run in memory."""
        layout = self._layouts.get(chain, nbytes, flags)
        cost = layout.scratch_nbytes + chain.max_encoded_nbytes(nbytes) + _OVERHEAD_NBYTES
        if chain.coder is not None and layout.slice_nbytes:
            lengths = layout.lengths[layout.coded]
            cost += self._coders.encode_nbytes(chain.coder, lengths)
            if self._decoder is not None:
                cost += self._coders.decode_nbytes(chain.coder, lengths)
        return cost if self._decoder is None else cost + nbytes

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> EncodedBatch:
        after = {job.ready for job in jobs if job.ready is not None}
        with self._device.session([tensor for job in jobs for tensor in job.tensors], tuple(after)):
            copies = {at: job.copy(self._device.arena.empty) for at, job in enumerate(jobs) if not job.is_run}
            runs = [copies.get(at, job.tensors[0]) for at, job in enumerate(jobs)]
            data = np.concatenate([job.starts(run.data_ptr()) for job, run in zip(jobs, runs, strict=True)])
            nbytes = np.concatenate([job.block_nbytes for job in jobs])
            layout = self._layout(jobs, nbytes)
            results = torch.zeros((3, nbytes.size), dtype=torch.int32, device=self._device.torch_device)
            crc, seen, flags = results.unbind()
            scratch, bases = self._split(layout, data, (crc, seen, flags))
            coded = self._code(layout, scratch)
            crcs, _, all_flags = results.cpu().numpy().view(np.uint32)
            _check_flags(layout, all_flags)
            layout = self._batches.get(layout.runs, nbytes, all_flags.astype(np.int64))
            run, stored_nbytes, starts = self._gather(layout, bases, coded)
            self._device.copy_out(run, out[: run.numel()])
            bounds = starts[layout.pieces.bounds]
            encoded_crcs = start_crcs(self._device, bounds[:-1] + run.data_ptr(), lengths_of(bounds))
            slice_nbytes = stored_nbytes[layout.slices]
            wrong = self._check(layout, slice_nbytes, crcs, run, bounds[:-1], scratch)
            columns = all_flags, read_crcs(encoded_crcs), crcs, nbytes, slice_nbytes, layout.slice_bounds
        return EncodedBatch(EncodedRun(out[: run.numel()], bounds, *columns), sorted(wrong))

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

    def _split(self, layout: BatchLayout, data: I64, results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, I64]:
        """Inspect the blocks and bring them into scratch memory; returns it, and where each block's pieces begin."""
        device = self._device
        crc, seen, flags = results
        scratch = device.arena.empty(int(layout.scratch_starts[-1]))
        # stored as it is, a block needs no scratch memory: its piece is the block itself
        bases = np.where(layout.scratch_nbytes > 0, layout.scratch_starts[:-1] + scratch.data_ptr(), data)
        columns = layout.widths, layout.packs, layout.planes + bases[:, np.newaxis]
        table = block_table(data, layout.nbytes, *columns)
        device.kernels.inspect(table, crc, seen)
        if layout.is_plain.any():  # these have no tiles, but a row: results are numbered by rows
            table = block_table(data, np.where(layout.is_plain, 0, layout.nbytes), *columns)
        device.kernels.split(table, seen, flags)
        copied = np.flatnonzero(layout.is_plain & (layout.scratch_nbytes > 0))
        if copied.size:
            nbytes = layout.nbytes[copied]
            device.kernels.copy(copy_table(data[copied], bases[copied], nbytes, np.zeros_like(nbytes)))
        return scratch, bases

    def _code(self, layout: BatchLayout, scratch: Tensor) -> list[tuple[I64, SliceFrames]]:
        """Start to encode all slices, which are the same whatever the flags; for each coder which of the slices."""
        places, lengths = layout.slice_places, layout.pieces.lengths[layout.slices]
        return [
            (which, self._coders.encode(coder, scratch, places[which], lengths[which]))
            for coder, which in layout.slices_of_coders
        ]

    def _gather(
        self, layout: BatchLayout, bases: I64, coded: Sequence[tuple[I64, SliceFrames]]
    ) -> tuple[Tensor, I64, I64]:
        """Bring all pieces into one run; returns it, their stored lengths and their starts."""
        pieces, slices = layout.pieces, layout.slices
        sources, stored_nbytes = bases[pieces.block] + pieces.places, pieces.lengths.copy()
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


def _check_flags(layout: BatchLayout, flags: U32) -> None:
    """Refuse flags that no codec has: decoding takes no notice of them, and no reader takes a file that has them."""
    packed = (flags == FLAG_PACKED_REST) | (flags == FLAG_PACKED_REST | FLAG_NEGATIVE)
    if not ((flags == 0) | packed & (layout.packs != 0)).all():
        raise RuntimeError(f"The GPU reports impossible flags for {flags.size} blocks.")


def arrived_wrong(run: EncodedRun) -> list[int]:
    """Return the blocks that are not in host memory as they were checked: neither copy nor CRCs are believed.

    One core computes CRCs at a fraction of the rate at which bytes arrive.
    """
    bounds, expected = run.bounds.tolist(), run.encoded_crcs.tolist()
    threads = min(_CRC_THREADS, len(run), -(-bounds[-1] // _CRC_SHARE_NBYTES))

    def wrong_of(blocks: range) -> list[int]:
        return [at for at in blocks if checksum(run.data[bounds[at] : bounds[at + 1]]) != expected[at]]

    if threads < 2:
        return wrong_of(range(len(run)))
    share = -(-len(run) // threads)
    parts = [range(start, min(start + share, len(run))) for start in range(0, len(run), share)]
    with ThreadPoolExecutor(threads - 1) as pool:
        try:
            others = [pool.submit(wrong_of, part) for part in parts[1:]]
        except RuntimeError:  # the interpreter ends, while the last asynchronous save is written
            return wrong_of(range(len(run)))
        return wrong_of(parts[0]) + [at for other in others for at in other.result()]
