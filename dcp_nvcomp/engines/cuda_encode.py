"""Blocks of one chain to encoded blocks, a batch at a time on a device.

inspect   each block's CRC and signs
split     blocks --> planes in scratch memory (without planes: a copy, as coders want aligned input)
code      slices of coded planes --> frames, each in a slot of its own
gather    stored planes and frames --> one contiguous run, which one copy takes to the host
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import FLAG_PACKED_REST, CodecChain
from dcp_nvcomp.codecs.planes import Planes
from dcp_nvcomp.engines.base import BlockRow, EncodedBlock
from dcp_nvcomp.engines.cpu import checksum
from dcp_nvcomp.engines.cuda_batches import (
    I64,
    BlockLayout,
    Layouts,
    Pieces,
    block_table,
    copy_table,
    join_pieces,
    padded_nbytes,
    starts_of,
)
from dcp_nvcomp.engines.cuda_device import Device
from dcp_nvcomp.engines.nvcomp_coders import Frames, NvcompCoders

__all__ = ["BatchEncoder"]

# Tables, results and the allocator's rounding, for each block.
_OVERHEAD_NBYTES = 2048


class BatchEncoder:
    """Encodes batches on a device.

    Args:
        device: the device.
        coders: nvCOMP on it.
    """

    def __init__(self, device: Device, coders: NvcompCoders) -> None:
        self._device = device
        self._coders = coders
        self._layouts = Layouts(every_plane=True)

    def cost_nbytes(self, chain: CodecChain, nbytes: int) -> int:
        """How much device memory a block of `nbytes` takes while it is encoded, beside itself."""
        layout = self._layouts.get(chain, nbytes, 0)
        cost = layout.scratch_nbytes + chain.max_encoded_nbytes(nbytes) + _OVERHEAD_NBYTES
        if chain.coder is not None and layout.slice_count:
            cost += self._coders.encode_nbytes(chain.coder, layout.lengths[layout.coded])
        return cost

    def encode(self, blocks: Sequence[Tensor], chain: CodecChain, out: memoryview) -> list[EncodedBlock]:
        """Encode a batch.

        Args:
            blocks: 1-D contiguous uint8 tensors on the device.
            chain: their codec chain.
            out: host memory that the encoded blocks are put into, one after the other.

        Returns:
            The encoded blocks, views of `out`.
        """
        nbytes = np.array([block.numel() for block in blocks], np.int64)
        with self._device.session(blocks):
            results = torch.zeros((3, len(blocks)), dtype=torch.int32, device=self._device.torch_device)
            crc, seen, flags = results.unbind()
            layouts = [self._layouts.get(chain, size, 0) for size in nbytes.tolist()]
            scratch, bases = self._split(blocks, nbytes, chain, layouts, (crc, seen, flags))
            frames = self._code(chain, scratch, bases, join_pieces(layouts))
            crcs, _, all_flags = results.cpu().numpy().view(np.uint32)
            layouts = [
                self._layouts.get(chain, size, flag)
                for size, flag in zip(nbytes.tolist(), all_flags.tolist(), strict=True)
            ]
            pieces = join_pieces(layouts)
            stored_nbytes, starts = self._gather(pieces, bases, frames, out)
        slice_nbytes = stored_nbytes[pieces.coded].tolist()
        slices = starts_of(np.array([layout.slice_count for layout in layouts], np.int64)).tolist()
        bounds = starts[pieces.bounds].tolist()
        encoded = []
        for index, (flag, block_crc) in enumerate(zip(all_flags.tolist(), crcs.tolist(), strict=True)):
            data = out[bounds[index] : bounds[index + 1]]
            row = BlockRow(flag, tuple(slice_nbytes[slices[index] : slices[index + 1]]), checksum(data), block_crc)
            encoded.append(EncodedBlock(data, row, int(nbytes[index])))
        return encoded

    def _split(
        self,
        blocks: Sequence[Tensor],
        nbytes: I64,
        chain: CodecChain,
        layouts: Sequence[BlockLayout],
        results: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, I64]:
        """Inspect the blocks and bring them into scratch memory; returns it, and where each block's pieces begin."""
        codec, device = chain.array_to_bytes, self._device
        crc, seen, flags = results
        data = np.array([block.data_ptr() for block in blocks], np.int64)
        offsets = starts_of(np.array([layout.scratch_nbytes for layout in layouts], np.int64))
        scratch = device.empty(int(offsets[-1]))
        # stored as they are, blocks need no scratch memory: their pieces are the blocks themselves
        bases = offsets[:-1] + scratch.data_ptr() if offsets[-1] else data
        split = isinstance(codec, Planes)
        table = block_table(
            data,
            nbytes,
            np.full_like(nbytes, codec.float_nbytes if isinstance(codec, Planes) else 1),
            np.full_like(nbytes, FLAG_PACKED_REST if isinstance(codec, Planes) and "rest" not in codec.coded else 0),
            np.array([layout.planes for layout in layouts], np.int64) + bases[:, np.newaxis],
        )
        device.kernels.inspect(table, crc, seen)
        if split:
            device.kernels.split(table, seen, flags)
        elif chain.coder is not None:
            device.kernels.copy(copy_table(data, bases, nbytes, np.zeros_like(nbytes)))
        return scratch, bases

    def _code(self, chain: CodecChain, scratch: Tensor, bases: I64, pieces: Pieces) -> Frames | None:
        """Encode all slices, which are the same whatever the flags; None where there are none."""
        if chain.coder is None or not pieces.coded.any():
            return None
        places = (bases[pieces.block] + pieces.places)[pieces.coded] - scratch.data_ptr()
        return self._coders.encode(chain.coder, scratch, places, pieces.lengths[pieces.coded])

    def _gather(self, pieces: Pieces, bases: I64, frames: Frames | None, out: memoryview) -> tuple[I64, I64]:
        """Bring all pieces into one run and start its copy to `out`; returns their stored lengths and their starts."""
        sources, stored_nbytes = bases[pieces.block] + pieces.places, pieces.lengths.copy()
        if frames is not None:
            slices = np.flatnonzero(pieces.coded)
            # a frame that is no shorter would be taken for a stored slice: store the slice
            shorter = frames.nbytes < stored_nbytes[slices]
            stored_nbytes[slices[shorter]] = frames.nbytes[shorter]
            sources[slices[shorter]] = frames.addresses[shorter]
        room = padded_nbytes(stored_nbytes)
        starts = starts_of(room)
        run_nbytes = int(starts[-1])
        run = self._device.empty(run_nbytes)
        table = copy_table(sources, starts[:-1] + run.data_ptr(), stored_nbytes, room - stored_nbytes)
        self._device.kernels.copy(table)
        self._device.copy_out(run, out[:run_nbytes])
        return stored_nbytes, starts
