"""Encoded blocks to blocks, a batch at a time on a device; the blocks may be of any chains.

check     on the host: CRC, lengths and flags, before the GPU sees a byte
fetch     encoded blocks --> one run of device memory
decode    frames --> slices of coded planes in scratch memory; stored slices are copied there
merge     planes --> blocks, in the caller's memory
inspect   each block's CRC, which is compared on the host

A block that does not come out as its row says is reported, not refused: whether it is corrupt or the GPU wrong, only
another decoder can tell. Encoding decodes each batch again, from where it was coded to, as a check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import BlockRow, CodecChain, checksum, padded
from dcp_nvcomp.engines.cuda.batches import (
    I64,
    BatchLayout,
    BatchLayouts,
    Layouts,
    Pieces,
    block_table,
    copy_table,
    padded_nbytes,
    split_width,
    starts_of,
)
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.slice_coders import DeviceCoders, SliceDecoding
from dcp_nvcomp.errors import CorruptDataError

Bools = npt.NDArray[np.bool_]
U32 = npt.NDArray[np.uint32]

_OVERHEAD_NBYTES = 2048


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One block to decode."""

    data: memoryview  # the encoded block in host memory
    row: BlockRow  # its rows of the footer's tables
    chain: CodecChain
    out: Tensor  # receives the block: 1-D contiguous uint8 on the device, exactly its decoded size
    path: str | None = None  # the file it is from, for messages
    fqn: str | None = None  # the state-dict key it is of, for messages
    byte_range: tuple[int, int] | None = None  # where in the file it lies, for messages


def _refuse(job: DecodeJob, message: str) -> NoReturn:
    raise CorruptDataError(message, path=job.path, fqn=job.fqn, byte_range=job.byte_range)


@dataclass(frozen=True)
class _Batch:
    """Addresses of all parts of a batch in device memory."""

    scratch: I64  # of each block, its scratch memory
    frames: I64  # of each piece, its stored form
    stored_nbytes: I64  # of each piece, the length of its stored form
    places: I64  # of each piece, its destination: scratch memory, or the block itself
    plain: Bools  # of each piece, True if its block is not split into planes


class JobChecks:
    """Checks of a block on the host, before a GPU sees it. Not for several threads at once."""

    def __init__(self) -> None:
        self._layouts = Layouts(every_plane=False)

    def check(self, job: DecodeJob) -> None:
        """Check a block; of `job.out` only the length matters.

        With `verify="off"` too: what a decoder on a GPU does with other bytes than an encoder wrote is not defined, and
        a fault there ends all work of the process on that GPU.
        """
        if checksum(job.data) != job.row.encoded_crc:
            _refuse(job, "The stored bytes fail their CRC: the file is corrupt.")
        codec = job.chain.array_to_bytes
        if not codec.check_flags(job.row.flags):
            _refuse(job, f"The block has flags {job.row.flags}, which its codec never writes.")
        if job.out.numel() % split_width(codec):
            _refuse(job, "The block is not a whole number of floats long.")
        layout = self._layouts.get(job.chain, job.out.numel(), job.row.flags)
        stored, decoded = job.row.slice_nbytes, layout.slice_nbytes
        if len(stored) != len(decoded):
            _refuse(job, "The block does not have the slices that its codec makes.")
        if any(not 1 <= nbytes <= most for nbytes, most in zip(stored, decoded, strict=True)):
            _refuse(job, "A slice does not fit into its block.")
        if sum(map(padded, stored)) + layout.stored_nbytes > job.data.nbytes:
            _refuse(job, "The block is shorter than its slices.")


@dataclass(frozen=True)
class Doubt:
    """What is wrong with a block that was decoded."""

    crc: int | None  # the CRC of what came out, which is not the row's; None if a slice did not decode at all
    what: str = "The decoded bytes fail their CRC."  # a sentence on the slice
    is_known: bool = True


@dataclass(frozen=True, eq=False)
class EncodedBlocks:
    """Blocks to decode on a device."""

    layout: BatchLayout  # without the planes that are stored as they are
    out: I64  # of each block, the address of its destination
    slice_nbytes: I64  # of each slice, its encoded length
    crcs: U32  # of each block, the CRC of its bytes


class BatchDecoder:
    """Decodes batches on a device."""

    def __init__(self, device: Device, coders: DeviceCoders) -> None:
        self._device = device
        self._coders = coders
        self._layouts = Layouts(every_plane=False)
        self._batches = BatchLayouts(every_plane=False)

    def layout(self, layout: BatchLayout) -> BatchLayout:
        """Return the layout for decoding of a batch that is laid out for encoding."""
        return self._batches.get(layout.runs, layout.nbytes, layout.flags)

    def costs_nbytes(self, jobs: Sequence[DecodeJob]) -> list[int]:
        """Return the device memory that decoding each block takes, in addition to the block."""
        known: dict[tuple[int, int, int], int] = {}
        costs = []
        for job in jobs:
            key = id(job.chain), job.out.numel(), job.row.flags
            if key not in known:
                known[key] = self._cost_nbytes(job)
            costs.append(known[key] + job.data.nbytes)
        return costs

    def _cost_nbytes(self, job: DecodeJob) -> int:
        """But for the encoded block."""
        layout = self._layouts.get(job.chain, job.out.numel(), job.row.flags)
        cost = layout.scratch_nbytes + _OVERHEAD_NBYTES
        if job.chain.coder is not None and layout.slice_nbytes:
            cost += self._coders.decode_nbytes(job.chain.coder, layout.lengths[layout.coded])
        return cost

    def decode(self, jobs: Sequence[DecodeJob]) -> dict[int, Doubt]:
        with self._device.session([job.out for job in jobs]):
            encoded, encoded_starts = self._fetch(jobs)
            out = np.array([job.out.data_ptr() for job in jobs], np.int64)
            crcs = np.array([job.row.uncompressed_crc for job in jobs], np.uint32)
            blocks = EncodedBlocks(_layout_of(self._batches, jobs), out, _slice_nbytes(jobs), crcs)
            scratch = self._device.arena.empty(int(blocks.layout.scratch_starts[-1]))
            return self.decode_on_device(blocks, encoded, encoded_starts[:-1], scratch)

    def decode_on_device(
        self, blocks: EncodedBlocks, encoded: Tensor, starts: I64, scratch: Tensor
    ) -> dict[int, Doubt]:
        """Decode blocks that are in device memory already, where they begin at `starts`; only inside a session.

        Args:
            blocks: the blocks.
            encoded: the memory that holds them.
            starts: of each block, its place there.
            scratch: as much as the layout's blocks need together.
        """
        pieces, plain = blocks.layout.pieces, blocks.layout.is_plain
        batch = _lay_out(blocks, starts + encoded.data_ptr(), blocks.layout.scratch_starts[:-1] + scratch.data_ptr())
        framed = pieces.coded & (batch.stored_nbytes < pieces.lengths)
        # slices stored as they are, and planes of blocks that are not split; merge reads other planes in place
        self._copy(batch.frames, batch.places, pieces.lengths, (pieces.coded | batch.plain) & ~framed)
        decodings = self._decode_slices(blocks.layout, batch, framed, encoded, scratch)
        self._copy(batch.scratch[pieces.block] + pieces.places, batch.places, pieces.lengths, framed & batch.plain)
        self._merge(blocks, batch, np.flatnonzero(~plain))
        found = read_crcs(start_crcs(self._device, blocks.out, blocks.layout.nbytes))
        doubts = {at: Doubt(int(found[at])) for at in np.flatnonzero(found != blocks.crcs).tolist()}
        for name, which, decoding in decodings:
            bad = ~decoding.good()
            for at, is_known in zip(pieces.block[which[bad]].tolist(), decoding.known()[bad].tolist(), strict=True):
                doubts[at] = Doubt(None, f"A {name} slice does not decode to its length.", is_known)
        return doubts

    def _fetch(self, jobs: Sequence[DecodeJob]) -> tuple[Tensor, I64]:
        nbytes = np.array([job.data.nbytes for job in jobs], np.int64)
        starts = starts_of(padded_nbytes(nbytes))
        encoded = self._device.arena.empty(int(starts[-1]))
        for run, start in zip(*_host_runs(jobs, nbytes, starts[:-1]), strict=True):
            self._device.copy_in(run, encoded[start : start + run.nbytes])
        return encoded, starts

    def _copy(self, source: I64, target: I64, nbytes: I64, which: Bools) -> None:
        if which.any():
            zeros = np.zeros(int(which.sum()), np.int64)
            self._device.kernels.copy(copy_table(source[which], target[which], nbytes[which], zeros))

    def _decode_slices(
        self, layout: BatchLayout, batch: _Batch, framed: Bools, encoded: Tensor, scratch: Tensor
    ) -> list[tuple[str, I64, SliceDecoding]]:
        """Start to decode all slices; return each coder's name, the numbers of its pieces, and the work under way."""
        pieces = layout.pieces
        places = batch.scratch[pieces.block] + pieces.places - scratch.data_ptr()
        decodings = []
        for coder, number in layout.coders.items():
            which = np.flatnonzero(framed & (layout.coder_of_piece == number))
            if which.size == 0:
                continue
            decoding = self._coders.decode(
                coder,
                encoded,
                batch.frames[which] - encoded.data_ptr(),
                batch.stored_nbytes[which],
                scratch,
                places[which],
                pieces.lengths[which],
            )
            decodings.append((coder.name, which, decoding))
        return decodings

    def _merge(self, blocks: EncodedBlocks, batch: _Batch, which: I64) -> None:
        if not which.size:
            return
        layout = blocks.layout
        in_scratch = layout.planes[which]
        as_stored = batch.frames[(layout.pieces.bounds[which, np.newaxis] + layout.first_pieces[which]).clip(min=0)]
        planes = np.where(in_scratch >= 0, batch.scratch[which, np.newaxis] + in_scratch, as_stored)
        self._device.kernels.merge(
            block_table(blocks.out[which], layout.nbytes[which], layout.widths[which], layout.flags[which], planes)
        )


def start_crcs(device: Device, addresses: I64, nbytes: I64) -> Tensor:
    """Start to compute the CRC32C of runs of device memory, for `read_crcs`; only inside a session."""
    results = torch.zeros((2, nbytes.size), dtype=torch.int32, device=device.torch_device)
    ones, zeros = np.ones_like(nbytes), np.zeros_like(nbytes)
    table = block_table(addresses, nbytes, ones, zeros, np.zeros((nbytes.size, 3), np.int64))
    device.kernels.inspect(table, results[0], results[1])
    return results[0]


def read_crcs(started: Tensor) -> npt.NDArray[np.uint32]:
    """Wait, and return what `start_crcs` started."""
    return started.cpu().numpy().view(np.uint32)


def _host_runs(jobs: Sequence[DecodeJob], nbytes: I64, starts: I64) -> tuple[list[memoryview], list[int]]:
    """Return the blocks' host memory, with adjacent blocks (those of one read) joined, and the starts of the runs."""
    # numpy's quickest way to an address; a batch has hundreds of blocks
    addresses = np.array([np.frombuffer(job.data, np.uint8).__array_interface__["data"][0] for job in jobs], np.int64)
    joined = (addresses[:-1] + nbytes[:-1] == addresses[1:]) & (starts[:-1] + nbytes[:-1] == starts[1:])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    last = np.concatenate([first[1:], [len(jobs)]]) - 1
    lengths = addresses[last] + nbytes[last] - addresses[first]
    runs = [
        memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
        for address, length in zip(addresses[first].tolist(), lengths.tolist(), strict=True)
    ]
    return runs, starts[first].tolist()


def _layout_of(batches: BatchLayouts, jobs: Sequence[DecodeJob]) -> BatchLayout:
    nbytes = np.array([job.out.numel() for job in jobs], np.int64)
    flags = np.array([job.row.flags for job in jobs], np.int64)
    runs = [[*same] for _, same in groupby((job.chain for job in jobs), id)]
    return batches.get(tuple([(chains[0], len(chains)) for chains in runs]), nbytes, flags)


def _slice_nbytes(jobs: Sequence[DecodeJob]) -> I64:
    return np.array([size for job in jobs for size in job.row.slice_nbytes], np.int64)


def _stored_pieces(pieces: Pieces, slice_nbytes: I64, encoded: I64) -> tuple[I64, I64]:
    """Return how long each piece is as stored, and where it lies if the encoded blocks begin at these places."""
    stored_nbytes = pieces.lengths.copy()
    stored_nbytes[pieces.coded] = slice_nbytes
    starts = starts_of(padded_nbytes(stored_nbytes))
    return stored_nbytes, starts[:-1] - starts[pieces.bounds[pieces.block]] + encoded[pieces.block]


def _lay_out(blocks: EncodedBlocks, encoded: I64, scratch: I64) -> _Batch:
    """Addresses of all pieces of checked blocks, whose encoded bytes and scratch memory begin at these addresses."""
    pieces = blocks.layout.pieces
    stored_nbytes, frames = _stored_pieces(pieces, blocks.slice_nbytes, encoded)
    plain = blocks.layout.is_plain[pieces.block]
    return _Batch(
        scratch=scratch,
        frames=frames,
        stored_nbytes=stored_nbytes,
        places=np.where(plain, blocks.out[pieces.block], scratch[pieces.block]) + pieces.places,
        plain=plain,
    )
