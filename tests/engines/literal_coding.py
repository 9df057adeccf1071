"""Encoding and decoding slices with literals*.cu on a CPU, with everything beside frames and slices watched."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zstandard

from dcp_nvcomp.codecs import Zstd
from dcp_nvcomp.engines.cuda.arena import Arena
from dcp_nvcomp.engines.cuda.batches import padded_nbytes, starts_of
from dcp_nvcomp.engines.cuda.literals import LiteralCoders

from .kernels_on_cpu import ReferenceKernels, emulated_launch
from .nvcomp_stand_in import StandInDevice

__all__ = [
    "CODER",
    "Encoded",
    "GuardPages",
    "GuardedDevice",
    "check",
    "cpu_frame",
    "decode",
    "encode",
    "libzstd",
    "too_long",
]

U8 = np.ndarray

CODER = Zstd(literals_only=True)
POISON = 0xA5  # what fresh memory contains
GUARD = 64


class GuardedArena(Arena):
    """Gives out memory with guards around it.

    Attributes:
        memory: what it gave out, since the last check.
        given_nbytes: how much it gave out in all.
    """

    def __init__(self) -> None:
        super().__init__(_poisoned)
        self.memory: list[torch.Tensor] = []
        self.given_nbytes = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        self.given_nbytes += nbytes
        self.memory.append(_poisoned(nbytes + 2 * GUARD))
        return self.memory[-1][GUARD : GUARD + nbytes]


def _poisoned(nbytes: int) -> torch.Tensor:
    """Memory full of garbage, at a multiple of 64."""
    memory = np.full(nbytes + 64, POISON, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + nbytes])


class GuardedDevice(StandInDevice):
    """A device that finds out whether anything was written beside its memory.

    Args:
        library: literals*.cu.
        seed: of the order in which threads run.
    """

    def __init__(self, library: ctypes.CDLL, seed: int | None = None) -> None:
        super().__init__(ReferenceKernels(), literals=emulated_launch(library, order=seed))
        self.arena: Arena = GuardedArena()

    def check(self) -> None:
        """Nothing was written beside the memory that was handed out since the last time."""
        guarded = self.arena
        assert isinstance(guarded, GuardedArena)
        for memory in guarded.memory:
            assert (memory[:GUARD] == POISON).all() and (memory[-GUARD:] == POISON).all()
        guarded.memory.clear()


@dataclass(frozen=True)
class Encoded:
    """What became of slices: frames, each empty where the slice is to be stored."""

    slices: list[bytes]
    frames: list[bytes]

    def framed(self) -> Encoded:
        """Those with a frame."""
        kept = [(data, frame) for data, frame in zip(self.slices, self.frames, strict=True) if frame]
        return Encoded([data for data, _ in kept], [frame for _, frame in kept])


def encode(device: GuardedDevice, coders: LiteralCoders, slices: Sequence[U8]) -> Encoded:
    """Encode slices; nothing is written but frames."""
    lengths = np.array([data.size for data in slices], np.int64)
    starts = starts_of(padded_nbytes(lengths))
    scratch = device.arena.empty(int(starts[-1]))
    for data, start in zip(slices, starts.tolist(), strict=False):
        scratch[start : start + data.size] = torch.from_numpy(data)
    before = scratch.clone()
    with device.session([]):
        frames = coders.encode(CODER, scratch, starts[:-1], lengths)
        nbytes = frames.nbytes()
        # with a gap behind each frame
        places = starts_of(padded_nbytes(nbytes) + 16)
        memory = device.arena.empty(int(places[-1]))
        frames.write(places[:-1] + memory.data_ptr())
    assert torch.equal(scratch, before)
    assert (nbytes >= 1).all() and (nbytes <= lengths).all()
    written, untouched = memory.numpy(), np.ones(memory.numel(), np.bool_)
    found = []
    for at, nbyte, length in zip(places.tolist(), nbytes.tolist(), lengths.tolist(), strict=False):
        frame = written[at : at + nbyte * (nbyte < length)]
        found.append(frame.tobytes())
        padding = written[at + frame.size : at + -(-frame.size // 16) * 16]
        assert not padding.any()
        untouched[at : at + frame.size + padding.size] = False
    assert (written[untouched] == POISON).all()
    device.check()
    return Encoded([data.tobytes() for data in slices], found)


def decode(
    device: GuardedDevice, coders: LiteralCoders, frames: Sequence[bytes], lengths: Sequence[int]
) -> list[bytes | None]:
    """Decode frames; None for each that is reported. Nothing is written beside the slices."""
    nbytes, sizes = np.array([len(frame) for frame in frames], np.int64), np.array(lengths, np.int64)
    # frames begin at any byte, slices at multiples of 16, with something between them
    at, places = starts_of(nbytes + 3), starts_of(padded_nbytes(sizes) + 16)
    encoded, scratch = device.arena.empty(-(-int(at[-1]) // 4) * 4), device.arena.empty(int(places[-1]))
    for frame, start in zip(frames, at.tolist(), strict=False):
        encoded[start : start + len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    with device.session([]):
        good = coders.decode(CODER, encoded, at[:-1], nbytes, scratch, places[:-1], sizes).good()
    decoded: list[bytes | None] = []
    memory, untouched = scratch.numpy(), np.ones(scratch.numel(), np.bool_)
    for is_good, place, length in zip(good, places.tolist(), lengths, strict=False):
        decoded.append(memory[place : place + length].tobytes() if is_good else None)
        untouched[place : place + length] = False
    assert (memory[untouched] == POISON).all()
    device.check()
    return decoded


def cpu_frame(data: bytes) -> bytes:
    """Return the compiled CPU encoder's frame; empty if it leaves the slice to libzstd."""
    from dcp_nvcomp.codecs.coders._literals import encode_literals

    out = bytearray(2 * len(data) + 4096)
    return bytes(out[: encode_literals(data, out)])


def libzstd(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def check(device: GuardedDevice, coders: LiteralCoders, slices: Sequence[U8]) -> Encoded:
    """Encode slices, and decode all frames with libzstd and with the kernel."""
    encoded = encode(device, coders, slices)
    framed = encoded.framed()
    for data, frame in zip(framed.slices, framed.frames, strict=True):
        assert libzstd(frame) == data
        assert zstandard.get_frame_parameters(frame).content_size == len(data)
    if framed.frames:
        assert decode(device, coders, framed.frames, [len(data) for data in framed.slices]) == framed.slices
    return encoded


def too_long(encoded: Encoded) -> int:
    """Return how many slices take over 1 % more than in the CPU encoder's frame."""
    found = 0
    for data, frame in zip(encoded.slices, encoded.frames, strict=True):
        theirs = len(cpu_frame(data))
        found += theirs > 0 and (len(frame) or len(data)) > 1.01 * theirs
    return found


# ---- memory beside which nothing can be accessed ---------------------------------------------------------------------


_LIBC = ctypes.CDLL(None, use_errno=True)


class GuardPages:
    """Allocates memory between pages that end the process if a byte of them is read or written."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def allocate(self, nbytes: int, *, at_end: bool = True) -> np.ndarray:
        """Return memory that ends at such a page, or begins at one."""
        inner_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(-1, inner_nbytes + 2 * mmap.PAGESIZE)
        self._kept.append(mapped)
        everything = np.frombuffer(mapped, np.uint8)
        for start in (0, mmap.PAGESIZE + inner_nbytes):
            page = ctypes.c_void_p(everything.ctypes.data + start)
            assert _LIBC.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        start = mmap.PAGESIZE + (inner_nbytes - nbytes if at_end else 0)
        return everything[start : start + nbytes]
