"""Encoded blocks to blocks, a batch at a time on a device; the blocks may be of any chains.

check     on the host, what the rows say: lengths, flags (decode_jobs.py)
fetch     encoded blocks --> one run of device memory; the CRC of each is compared before a decoder sees it
decode    frames --> slices of coded planes in scratch memory; stored slices are copied there
merge     planes --> blocks, in the caller's memory
inspect   each decoded block's CRC, which is compared on the host

A block that does not come out as its row says is reported, not refused: whether it is corrupt or the GPU wrong, only
another decoder can tell. Encoding decodes each batch again, from where it was coded to, as a check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.engines.cuda.batches import (
    I64,
    BatchLayout,
    BatchLayouts,
    BlockCosts,
    Layouts,
    Pieces,
    block_table,
    copy_table,
    padded_nbytes,
    starts_of,
)
from dcp_nvcomp.engines.cuda.decode_jobs import U32, Columns, DecodeJob, DecodeRun, Work
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.slice_coders import DeviceCoders, SliceDecoding

Bools = npt.NDArray[np.bool_]

_OVERHEAD_NBYTES = 2048


@dataclass(frozen=True)
class _Batch:
    """Addresses of all parts of a batch in device memory."""

    scratch: I64  # of each block, its scratch memory
    frames: I64  # of each piece, its stored form
    stored_nbytes: I64  # of each piece, the length of its stored form
    places: I64  # of each piece, its destination: scratch memory, or the block itself
    plain: Bools  # of each piece, True if its block is not split into planes


@dataclass(frozen=True)
class Doubt:
    """What is wrong with a block that was decoded."""

    crc: int | None  # the CRC of what came out, which is not the row's; None if a slice did not decode at all
    what: str = "The decoded bytes fail their CRC."  # a sentence on the slice
    is_known: bool = True


_ARRIVED_WRONG = Doubt(None, "The stored bytes fail their CRC on the GPU.")


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
        self._costs = BlockCosts(self._cost_nbytes)

    def layout(self, layout: BatchLayout) -> BatchLayout:
        """Return the layout for decoding of a batch that is laid out for encoding."""
        return self._batches.get(layout.runs, layout.nbytes, layout.flags)

    def _layout_of(self, columns: Columns) -> BatchLayout:
        return columns.layout or self._batches.get(columns.runs, columns.nbytes, columns.flags)

    def costs_nbytes(self, columns: Columns) -> list[int]:
        """Return the device memory that decoding each block takes, in addition to the block."""
        costs = self._costs.get(self._layout_of(columns))
        found: list[int] = (costs + columns.encoded_nbytes).tolist()
        return found

    def _cost_nbytes(self, chain: CodecChain, nbytes: int, flags: int) -> int:
        """But for the encoded block."""
        layout = self._layouts.get(chain, nbytes, flags)
        cost = layout.scratch_nbytes + _OVERHEAD_NBYTES
        if chain.coder is not None and layout.slice_nbytes:
            cost += self._coders.decode_nbytes(chain.coder, layout.lengths[layout.coded])
        return cost

    def decode(self, works: Sequence[Work], columns: Columns) -> dict[int, Doubt]:
        """Decode blocks; return what is wrong with some of them, which are numbered through all of the works."""
        with self._device.session([work.out for work in works]):
            encoded, bounds = self._fetch(works, columns.encoded_nbytes)
            layout, starts = self._layout_of(columns), bounds[:-1]
            stored = read_crcs(start_crcs(self._device, starts + encoded.data_ptr(), columns.encoded_nbytes))
            sound = np.flatnonzero(stored == columns.encoded_crcs)
            if sound.size == stored.size:
                return self._decode_sound(columns, layout, encoded, starts)
            # What a decoder on a GPU does with other bytes than an encoder wrote is not defined, and a fault there ends
            # all work of the process on that GPU.
            doubts = dict.fromkeys(np.flatnonzero(stored != columns.encoded_crcs).tolist(), _ARRIVED_WRONG)
            if sound.size:
                columns = columns.some(sound, layout.slice_bounds)
                layout = self._layout_of(columns)
                found = self._decode_sound(columns, layout, encoded, starts[sound])
                doubts |= {int(sound[at]): doubt for at, doubt in found.items()}
            return doubts

    def _decode_sound(self, columns: Columns, layout: BatchLayout, encoded: Tensor, starts: I64) -> dict[int, Doubt]:
        blocks = EncodedBlocks(layout, columns.out, columns.slice_nbytes, columns.crcs)
        scratch = self._device.arena.empty(int(layout.scratch_starts[-1]))
        return self.decode_on_device(blocks, encoded, starts, scratch)

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

    def _fetch(self, works: Sequence[Work], nbytes: I64) -> tuple[Tensor, I64]:
        starts, at = starts_of(padded_nbytes(nbytes)), 0
        encoded = self._device.arena.empty(int(starts[-1]))

        def fetch(host: memoryview, start: int) -> None:
            self._device.copy_in(host, encoded[start : start + host.nbytes])

        for kind, same in groupby(works, type):
            these = [*same]
            stop = at + sum(work.count for work in these)
            if kind is DecodeRun:
                for run in these:
                    assert isinstance(run, DecodeRun)
                    fetch(run.encoded.data, int(starts[at]))
                    at += run.count
            else:
                hosts = [job.data for job in these if isinstance(job, DecodeJob)]
                for host, start in zip(*_host_runs(hosts, nbytes[at:stop], starts[at:stop]), strict=True):
                    fetch(host, start)
            at = stop
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


def _host_runs(hosts: Sequence[memoryview], nbytes: I64, starts: I64) -> tuple[list[memoryview], list[int]]:
    """Return the blocks' host memory, with adjacent blocks (those of one read) joined, and the starts of the runs."""
    # numpy's quickest way to an address; a batch has hundreds of blocks
    addresses = np.array([np.frombuffer(host, np.uint8).__array_interface__["data"][0] for host in hosts], np.int64)
    joined = (addresses[:-1] + nbytes[:-1] == addresses[1:]) & (starts[:-1] + nbytes[:-1] == starts[1:])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    last = np.concatenate([first[1:], [len(hosts)]]) - 1
    lengths = addresses[last] + nbytes[last] - addresses[first]
    runs = [
        memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
        for address, length in zip(addresses[first].tolist(), lengths.tolist(), strict=True)
    ]
    return runs, starts[first].tolist()


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
