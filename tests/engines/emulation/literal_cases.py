"""The kernels of literals*.cu on slices of all kinds, and on frames that are corrupt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import zstandard

from dcp_nvcomp.engines.cuda.batches import padded_nbytes, starts_of
from dcp_nvcomp.engines.cuda.device import Launch
from dcp_nvcomp.engines.cuda.literals import LiteralKernels

from ..literal_slices import deep, skewed
from .memory import SharedMemory, WrongResultError, expect

__all__ = ["check_literals"]

_BLOCK_NBYTES = 128 << 10
_HEADER_NBYTES = 9
_WEIGHTS_AT = _HEADER_NBYTES + 3 + 5  # in a frame with codes
_JUMP_TABLE_NBYTES = 6


def check_literals(memory: SharedMemory, launch: Launch) -> None:
    """Encode and decode slices. One thread block a launch first, as each of them takes 300 MB and its time."""
    random = np.random.default_rng(3)
    kernels = LiteralKernels(launch)
    batches = (
        # weights that only fit if they are compressed
        (skewed(random, 9_001, 140, 0, 1.05),),
        # weights that are listed; codes of 11 bits; a repeated byte
        (skewed(random, 5_003, 5, 1, 1.5), deep(random, 20, 30)[:12_000], np.full(700, 7, np.uint8)),
        # several runs in a word; what is stored
        (skewed(random, 41, 2, 0, 1.0), random.integers(0, 256, 500, np.uint8)),
    )
    (frame,) = _check_batch(memory, kernels, batches[0])
    data = batches[0][0].tobytes()
    repeated, two_blocks = bytes([9]) * _BLOCK_NBYTES, _two_blocks(9, frame, _BLOCK_NBYTES + len(data))
    memory.clear()
    _decode(memory, kernels, [repeated + data, data], [two_blocks, frame])
    memory.clear()
    _report(memory, kernels, data, [_without_end_marks(frame), b"none" + frame[4:], two_blocks])
    memory.clear()
    counts = [len(_check_batch(memory, kernels, batch)) for batch in batches[1:]]
    if counts != [3, 1]:
        raise WrongResultError("a slice of random bytes has a frame, or another one has none")


def _check_batch(memory: SharedMemory, kernels: LiteralKernels, slices: Sequence[np.ndarray]) -> list[bytes]:
    """Encode slices, decode their frames with libzstd and the kernel, and return them; stored slices have none."""
    memory.clear()
    pairs = zip(slices, _encode(memory, kernels, slices), strict=True)
    framed = [(data.tobytes(), frame) for data, frame in pairs if frame is not None]
    for data, frame in framed:
        expect("frame", zstandard.ZstdDecompressor().decompress(frame), data)
    memory.clear()
    _decode(memory, kernels, [data for data, _ in framed], [frame for _, frame in framed])
    return [frame for _, frame in framed]


def _encode(memory: SharedMemory, kernels: LiteralKernels, slices: Sequence[np.ndarray]) -> list[bytes | None]:
    count = len(slices)
    lengths = np.array([data.size for data in slices], np.int64)
    data = [memory.put(values) for values in slices]
    memory.empty(16)  # behind the last one too
    rows = torch.from_numpy(memory.put(np.array([[d.ctypes.data, d.size] for d in data], np.int64)).view(np.int64))
    plans = torch.from_numpy(memory.empty(2048 * count))
    nbytes = memory.empty(4 * count).view(np.int32)
    frames = memory.empty(int(padded_nbytes(lengths).sum()))
    kernels.measure(rows.view(count, 2), plans, torch.from_numpy(nbytes))
    # one right behind the other
    places = starts_of(np.where(nbytes < lengths, padded_nbytes(nbytes.astype(np.int64)), 0))[:-1]
    targets = memory.put(np.stack([places + frames.ctypes.data, nbytes.astype(np.int64)], axis=1)).view(np.int64)
    kernels.write(rows.view(count, 2), plans, torch.from_numpy(targets).view(count, 2))
    found = zip(places.tolist(), nbytes.tolist(), lengths.tolist(), strict=True)
    return [frames[at : at + size].tobytes() if size < length else None for at, size, length in found]


def _two_blocks(repeated: int, frame: bytes, nbytes: int) -> bytes:
    """Return a frame of a full block of one byte, and the block of another frame."""
    header = frame[: _HEADER_NBYTES - 4] + nbytes.to_bytes(4, "little")
    block = (1 << 1 | _BLOCK_NBYTES << 3).to_bytes(3, "little") + bytes([repeated])
    return header + block + frame[_HEADER_NBYTES:]


def _without_end_marks(frame: bytes) -> bytes:
    """Return a frame whose streams can't be decoded, neither the first nor the second."""
    weights = frame[_WEIGHTS_AT]
    jumps_at = _WEIGHTS_AT + 1 + ((weights - 126) // 2 if weights > 127 else weights)
    first, second = (int.from_bytes(frame[jumps_at + at :][:2], "little") for at in (0, 2))
    changed = bytearray(frame)
    for end in (first, first + second):
        changed[jumps_at + _JUMP_TABLE_NBYTES + end - 1] = 0
    return bytes(changed)


def _decode(memory: SharedMemory, kernels: LiteralKernels, slices: Sequence[bytes], frames: Sequence[bytes]) -> None:
    found, corrupt = _run_decoder(memory, kernels, frames, [len(data) for data in slices])
    expect("decoded", b"".join(found), b"".join(slices))
    expect("corrupt", corrupt, bytes(len(slices)))


def _report(memory: SharedMemory, kernels: LiteralKernels, data: bytes, frames: Sequence[bytes]) -> None:
    _, corrupt = _run_decoder(memory, kernels, frames, [len(data)] * len(frames))
    expect("corrupt", corrupt, bytes([1] * len(frames)))


def _run_decoder(
    memory: SharedMemory, kernels: LiteralKernels, frames: Sequence[bytes], lengths: Sequence[int]
) -> tuple[list[bytes], bytes]:
    places = starts_of(padded_nbytes(np.array(lengths, np.int64))).tolist()
    out = memory.empty(places[-1])
    rows = []
    for place, length, frame in zip(places, lengths, frames, strict=False):
        encoded = memory.put(np.frombuffer(frame, np.uint8), misaligned=len(frame) % 4)
        rows.append([encoded.ctypes.data, len(frame), out.ctypes.data + place, length])
    memory.empty(16)
    table = torch.from_numpy(memory.put(np.array(rows, np.int64)).view(np.int64)).view(-1, 4)
    corrupt = memory.empty(4 * len(rows)).view(np.int32)
    kernels.decode(table, torch.from_numpy(corrupt))
    found = [out[place : place + length].tobytes() for place, length in zip(places, lengths, strict=False)]
    return found, corrupt.astype(np.uint8).tobytes()
