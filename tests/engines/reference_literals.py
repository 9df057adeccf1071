"""The kernels of literals*.cu in terms of libraries: quick, for tests of what is around them."""

from __future__ import annotations

import ctypes

import numpy as np
import zstandard

from dcp_nvcomp.codecs import Zstd
from dcp_nvcomp.engines.cuda.literals import MAX_SLICE_NBYTES, PLAN_NBYTES

__all__ = ["ReferenceLiterals"]


def _array(address: int, count: int, dtype: type[np.generic]) -> np.ndarray:
    memory = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def _literals_only(frame: bytes) -> bool:
    """Of a frame of one block: without sequences it ends with their number, with them never with 0."""
    header_nbytes = zstandard.frame_header_size(frame)
    is_compressed = frame[header_nbytes] >> 1 & 3 == 2
    return not is_compressed or frame[-1] == 0


class ReferenceLiterals:
    """Starts the kernels, in the place of CuPy.

    Attributes:
        moved: bytes that the last launch read and wrote, but for tables.
    """

    def __init__(self) -> None:
        self.moved = (0, 0)
        self._encode = Zstd(MAX_SLICE_NBYTES, literals_only=True).encoder()

    def __call__(self, name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        self.moved = getattr(self, f"_{name}")(blocks, *arguments)

    def _measure_slices(self, count: int, slices: int, plans: int, frame_nbytes: int) -> tuple[int, int]:
        found = _array(frame_nbytes, count, np.uint32)
        rows = _array(slices, 2 * count, np.int64).reshape(-1, 2)
        for at, (address, nbytes) in enumerate(rows.tolist()):
            found[at] = min(len(self._frame(address, nbytes)), nbytes)
        return int(rows[:, 1].sum()), count * PLAN_NBYTES

    def _write_slices(self, count: int, slices: int, plans: int, frames: int) -> tuple[int, int]:
        rows, places = (_array(table, 2 * count, np.int64).reshape(-1, 2).tolist() for table in (slices, frames))
        read_nbytes, written_nbytes = count * PLAN_NBYTES, 0
        for (address, nbytes), (target, room) in zip(rows, places, strict=True):
            frame = self._frame(address, nbytes)
            if len(frame) < nbytes and len(frame) == room:
                padded = frame + bytes(-len(frame) % 16)
                _array(target, len(padded), np.uint8)[:] = np.frombuffer(padded, np.uint8)
                read_nbytes += nbytes
                written_nbytes += len(padded)
        return read_nbytes, written_nbytes

    def _frame(self, address: int, nbytes: int) -> bytes:
        data = _array(address, nbytes, np.uint8)
        frame = bytes(self._encode(memoryview(data)))
        return frame if _literals_only(frame) else data.tobytes()  # libzstd codes short slices, perhaps with matches

    def _decode_slices(self, blocks: int, rows: int, count: int, corrupt: int) -> tuple[int, int]:
        failed = _array(corrupt, count, np.int32)
        for at, row in enumerate(_array(rows, 4 * count, np.int64).reshape(-1, 4).tolist()):
            frame, out = _array(row[0], row[1], np.uint8).tobytes(), _array(row[2], row[3], np.uint8)
            try:
                decoded = zstandard.ZstdDecompressor().decompress(frame, row[3], allow_extra_data=False)
                known = len(decoded) == row[3] and _literals_only(frame)
            except zstandard.ZstdError:
                known = False
            failed[at] = not known
            if known:
                out[:] = np.frombuffer(decoded, np.uint8)
        lengths = _array(rows, 4 * count, np.int64).reshape(-1, 4)[:, (1, 3)].sum(axis=0)
        return int(lengths[0]), int(lengths[1])
