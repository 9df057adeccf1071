"""The CPU engine: numpy, zstandard and zlib. Works everywhere and never imports nvCOMP.

One `CpuEngine` per thread: it owns contexts and scratch memory, reused from block to block. The heavy calls (numpy,
zstd, zlib, CRC32C) release the GIL, so threads scale.

Blocks of trained floats are coded whole, in one compiled call (codecs/registry.py); all others in steps: summed,
split into planes, and coded slice by slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcp_nvcomp.codecs.base import (
    U8,
    BlockRow,
    CodecChain,
    Coder,
    EncodedBlock,
    Plane,
    ScratchArrays,
    SliceDecoder,
    SliceEncoder,
    checksum,
    padded,
)
from dcp_nvcomp.codecs.registry import PlanesLiterals, planes_literals
from dcp_nvcomp.errors import CorruptDataError

_SKIPPED_BLOCKS = 15


class CpuEngine:
    """Encodes and decodes blocks in host memory. Not for several threads at once: each takes its own.

    Examples:
        >>> import numpy as np
        >>> from dcp_nvcomp.codecs import CodecChain, Planes, Zstd
        >>> chain, engine = CodecChain(Planes(2), Zstd()), CpuEngine()
        >>> block = np.arange(1 << 16, dtype=np.uint8)
        >>> encoded = engine.encode(block, chain, memoryview(bytearray(chain.max_encoded_nbytes(block.nbytes))))
        >>> out = np.empty_like(block)
        >>> engine.decode(encoded.data, encoded.row, chain, out, verify="full")
        >>> bool((out == block).all())
        True
    """

    def __init__(self) -> None:
        self._scratch = ScratchArrays()
        self._encoders: dict[Coder, SliceEncoder] = {}
        self._decoders: dict[Coder, SliceDecoder] = {}
        self._whole: dict[tuple[CodecChain, bool], PlanesLiterals | None] = {}
        self._skipped: dict[CodecChain, int] = {}

    def encode(self, block: U8, chain: CodecChain, out: memoryview) -> EncodedBlock:
        """Encode one block."""
        return self.encode_beside(block[np.newaxis], (block.size,), chain, out)[0][0]

    def encode_from(self, base: U8, rows: U8, chain: CodecChain, out: memoryview) -> EncodedBlock:
        """Encode one block by what its base has in its place; both are matrices."""
        target, codec = np.frombuffer(out, np.uint8), chain.array_to_bytes
        split = codec.split_from(base, rows, self._arrays(codec.layout(rows.size, 0, False), target))
        position = 0
        for plane in codec.layout(rows.size, split.flags, False):
            position = _pad(target, position + plane.nbytes)
        encoded = out[:position]
        row = BlockRow(split.flags, (), checksum(encoded), split.crc)
        return EncodedBlock(encoded, row, rows.size, split.base_crc if codec.needs_base(split.flags) else None)

    def encode_beside(
        self, rows: U8, widths: tuple[int, ...], chain: CodecChain, out: memoryview
    ) -> tuple[list[EncodedBlock], int]:
        """Encode blocks that lie beside each other in a matrix."""
        whole = self._whole_blocks(chain, decoding=False)
        done = None if whole is None else whole.encode(rows, widths, out)
        if done is not None:
            return done
        if len(widths) == 1:
            encoded = self._encode_in_steps(self._joined(rows), chain, out)
            return [encoded], len(encoded.data)
        # one of them may be too short for the kernel, the others are not
        blocks, start, position = list[EncodedBlock](), 0, 0
        for width in widths:
            one, nbytes = self.encode_beside(rows[:, start : start + width], (width,), chain, out[position:])
            blocks += one
            start, position = start + width, position + nbytes
        return blocks, position

    def _whole_blocks(self, chain: CodecChain, *, decoding: bool) -> PlanesLiterals | None:
        if decoding and self._skipped.get(chain):
            self._skipped[chain] -= 1
            return None
        key = chain, decoding
        if key not in self._whole:
            self._whole[key] = planes_literals(chain, decoding=decoding)
        return self._whole[key]

    def _joined(self, rows: U8) -> U8:
        """Return the bytes of some rows: a view if possible, else a copy, valid until the next call."""
        if rows.flags.c_contiguous:
            return rows.reshape(-1)
        copy: U8 = self._scratch.array("joined", rows.size, np.uint8)
        np.copyto(copy.reshape(rows.shape), rows)
        return copy

    def _encode_in_steps(self, block: U8, chain: CodecChain, out: memoryview) -> EncodedBlock:
        target = np.frombuffer(out, np.uint8)
        codec, has_coder = chain.array_to_bytes, chain.coder is not None
        # first, as this brings the block into the cache, from where it is split faster than from memory
        crc = 0 if codec.is_plain else checksum(block)
        arrays = self._arrays(codec.layout(block.nbytes, 0, has_coder), target)
        flags = codec.split(block, arrays)
        sizes: list[int] = []
        position = 0
        for plane, array in zip(codec.layout(block.nbytes, flags, has_coder), arrays, strict=True):
            data = array[: plane.nbytes]
            if plane.coded:
                position = self._encode_slices(data, chain, target, position, sizes)
            else:
                # leading stored planes were split in place; everything else is copied there now
                if data.size and data.ctypes.data != target[position:].ctypes.data:
                    target[position : position + data.size] = data
                position = _pad(target, position + data.size)
        encoded = out[:position]
        if codec.is_plain:  # of the copy: another process may write into the tensor at the same time
            crc = checksum(arrays[0])
        row = BlockRow(flags, tuple(sizes), checksum(encoded), crc)
        return EncodedBlock(encoded, row, block.nbytes)

    def _arrays(self, planes: Sequence[Plane], target: U8) -> list[U8]:
        """Return memory for planes: where they belong in the encoded block, as long as all before are stored."""
        arrays: list[U8] = []
        position, in_place = 0, True
        for index, plane in enumerate(planes):
            in_place = in_place and not plane.coded
            if in_place:
                arrays.append(target[position : position + plane.nbytes])
                position += padded(plane.nbytes)
            else:
                arrays.append(self._scratch.array(f"plane {index}", plane.nbytes, np.uint8))
        return arrays

    def _encode_slices(self, plane: U8, chain: CodecChain, target: U8, position: int, sizes: list[int]) -> int:
        assert chain.coder is not None
        encode = self._encoders.get(chain.coder)
        if encode is None:
            encode = self._encoders[chain.coder] = chain.coder.encoder()
        view, step = plane.data, chain.coder.slice_nbytes
        for start in range(0, plane.size, step):
            raw = view[start : start + step]
            frame = encode(raw)
            # a frame that is no smaller would be taken for a stored slice: store it
            stored = frame if len(frame) < len(raw) else raw
            target[position : position + len(stored)] = np.frombuffer(stored, np.uint8)
            sizes.append(len(stored))
            position = _pad(target, position + len(stored))
        return position

    def decode(
        self, data: memoryview, row: BlockRow, chain: CodecChain, out: U8, *, verify: str, base: U8 | None = None
    ) -> None:
        """Decode one block; `base` is what its record's base has in its place, if its codec needs that."""
        if base is not None:
            self._decode_from(base, data, row, chain, out, verify)
            return
        whole = self._whole_blocks(chain, decoding=True)
        if whole is not None:
            rows = out if out.ndim == 2 else out[np.newaxis]
            outcome = whole.decode([(data, row)], (rows.shape[1],), rows, verify=verify)
            if outcome.decoded:
                return
            if outcome.problem is not None:
                raise CorruptDataError(outcome.problem)
            self._learn(chain, outcome.is_foreign)
        if out.flags.c_contiguous:
            self._decode_in_steps(data, row, chain, out.reshape(-1), verify)
            return
        decoded = self._scratch.array("joined", out.size, np.uint8)
        self._decode_in_steps(data, row, chain, decoded, verify)
        np.copyto(out, decoded.reshape(out.shape))

    def decodes_whole(self, chain: CodecChain) -> bool:
        """Return True if `decode_beside` is worth a trial: there is a kernel, and no frames of others were just met."""
        return not self._skipped.get(chain) and self._whole_blocks(chain, decoding=True) is not None

    def decode_beside(
        self,
        blocks: Sequence[tuple[memoryview, BlockRow]],
        widths: tuple[int, ...],
        chain: CodecChain,
        rows: U8,
        *,
        verify: str,
    ) -> bool:
        """Decode blocks that lie beside each other in a matrix, if all of them can be in one call."""
        whole = self._whole_blocks(chain, decoding=True)
        if whole is None:
            return False
        outcome = whole.decode(blocks, widths, rows, verify=verify)
        self._learn(chain, outcome.is_foreign)
        return outcome.decoded

    def _learn(self, chain: CodecChain, is_foreign: bool) -> None:
        """Decode some blocks in steps after one whose frames were made elsewhere: there are more, and trying costs."""
        if is_foreign:
            self._skipped[chain] = _SKIPPED_BLOCKS

    def _decode_from(self, base: U8, data: memoryview, row: BlockRow, chain: CodecChain, out: U8, verify: str) -> None:
        _check_stored(data, row, verify)
        planes = self._fill_planes(np.frombuffer(data, np.uint8), row, chain, out.nbytes, [None, None])
        rows = out if out.ndim == 2 else out[np.newaxis]
        _check_decoded(chain.array_to_bytes.merge_from(base, planes, row.flags, rows), row, verify)

    def _decode_in_steps(self, data: memoryview, row: BlockRow, chain: CodecChain, out: U8, verify: str) -> None:
        _check_stored(data, row, verify)
        self._decode_planes(data, row, chain, out)
        if verify == "full":
            _check_decoded(checksum(out), row, verify)

    def _decode_planes(self, data: memoryview, row: BlockRow, chain: CodecChain, out: U8) -> None:
        codec = chain.array_to_bytes
        source = np.frombuffer(data, np.uint8)
        if codec.is_plain:
            self._fill_planes(source, row, chain, out.nbytes, [out])
            return
        arrays = [
            self._scratch.array(f"plane {index}", plane.nbytes, np.uint8) if plane.coded else None
            for index, plane in enumerate(codec.layout(out.nbytes, row.flags, chain.coder is not None))
        ]
        codec.merge(self._fill_planes(source, row, chain, out.nbytes, arrays), row.flags, out, self._scratch)

    def _fill_planes(
        self, source: U8, row: BlockRow, chain: CodecChain, nbytes: int, planes: Sequence[U8 | None]
    ) -> list[U8]:
        """Decode coded slices into their planes; a stored plane without an array is used in place."""
        filled = list(planes)
        sizes = iter(row.slice_nbytes)
        position = 0
        for piece in chain.layout(nbytes, row.flags):
            stored_nbytes = next(sizes, -1) if piece.coded else piece.nbytes
            stop = position + stored_nbytes
            if not 0 <= stored_nbytes <= piece.nbytes or stop > source.size:
                raise CorruptDataError("A slice does not fit into its block.")
            stored = source[position:stop]
            target = filled[piece.plane]
            if target is None:
                filled[piece.plane] = stored
            elif stored_nbytes == piece.nbytes:
                target[piece.start : piece.start + piece.nbytes] = stored
            else:
                assert chain.coder is not None
                decode = self._decoders.get(chain.coder)
                if decode is None:
                    decode = self._decoders[chain.coder] = chain.coder.decoder()
                decode(stored.data, target[piece.start : piece.start + piece.nbytes].data)
            position = padded(stop)
        if next(sizes, None) is not None or position > source.size:
            raise CorruptDataError("The block does not have the slices that its codec makes.")
        return [plane for plane in filled if plane is not None]


def _check_stored(data: memoryview, row: BlockRow, verify: str) -> None:
    if verify != "off" and checksum(data) != row.encoded_crc:
        raise CorruptDataError("The stored bytes fail their CRC: the file is corrupt.")


def _check_decoded(crc: int, row: BlockRow, verify: str) -> None:
    if verify == "full" and crc != row.uncompressed_crc:
        raise CorruptDataError("The decoded bytes fail their CRC, though the stored ones match theirs.")


def _pad(target: U8, position: int) -> int:
    """Zero the bytes up to the alignment, and return where the next piece begins."""
    stop = padded(position)
    target[position:stop] = 0
    return stop
