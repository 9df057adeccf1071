"""Frames that are none, or odd ones, in blocks whose CRC is right: no GPU sees them, and the CPU engine judges them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import zstandard

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import BlockRow, checksum, padded
from dcp_nvcomp.engines.cuda.engine import DecodeJob
from dcp_nvcomp.errors import CorruptDataError

from .cases import U8, cpu_encode, engine_on, job, weights
from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import NvcompStandIn, StandInDevice

SLICE = 1 << 20
ZSTD = CodecChain(Bytes(), Zstd(SLICE))
DEFLATE = CodecChain(Bytes(), Deflate(SLICE))


def block_of(frames: Sequence[bytes], content: bytes, chain: CodecChain = ZSTD) -> DecodeJob:
    """Return the job of a block of these frames, each of a slice of SLICE bytes, with good CRCs."""
    data = b"".join(frame.ljust(padded(len(frame)), b"\0") for frame in frames)
    row = BlockRow(0, tuple(map(len, frames)), checksum(memoryview(data)), checksum(memoryview(content)))
    out = torch.full((len(content),), 0xEE, dtype=torch.uint8)
    return DecodeJob(memoryview(data), row, chain, out, path="run/x.distcp", fqn="w", byte_range=(16, 32))


def good_jobs() -> tuple[list[U8], list[DecodeJob]]:
    blocks = [weights(4, 5000, seed=seed) for seed in range(4)]
    chains = [CodecChain(Planes(4), Zstd(2048)), CodecChain(Planes(4), Deflate(2048)), CodecChain(Bytes()), ZSTD]
    return blocks, [job(cpu_encode(block, chain), chain) for block, chain in zip(blocks, chains, strict=True)]


def oversized_raw_block(content: bytes) -> bytes:
    """A frame that libzstd takes and the RFC forbids: more than 128 KiB in one block, then a run."""
    header = bytes.fromhex("28B52FFD A0") + len(content).to_bytes(4, "little")
    stored, run = content[: len(content) // 2], len(content) - len(content) // 2
    assert content[-run:] == content[-1:] * run
    raw = (len(stored) << 3).to_bytes(3, "little") + stored
    return header + raw + (run << 3 | 1 << 1 | 1).to_bytes(3, "little") + content[-1:]


@pytest.mark.parametrize(
    ("frame", "chain"),
    [
        (b"no zstd frame", ZSTD),
        (zstandard.compress(bytes(SLICE))[:-1], ZSTD),
        (zstandard.compress(bytes(SLICE)) + b"\0", ZSTD),
        (zstandard.compress(bytes(SLICE - 1)), ZSTD),
        (b"\7\0", DEFLATE),
        (b"\1\5\0\0\0hello", DEFLATE),
    ],
)
def test_what_is_no_frame_is_refused_before_the_gpu_sees_it(frame: bytes, chain: CodecChain) -> None:
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    _, good = good_jobs()
    with pytest.raises(CorruptDataError, match=r"slice.*x\.distcp.*'w'.*16 to 32"):
        engine.decode([*good, block_of([frame], bytes(SLICE), chain)], verify="stored")
    assert nvcomp.calls == []


def test_an_odd_frame_is_decoded_by_the_cpu_and_all_others_on_the_gpu() -> None:
    content = np.random.default_rng(0).integers(0, 256, SLICE // 2, np.uint8).tobytes() + bytes(SLICE // 2)
    odd = block_of([oversized_raw_block(content)], content)
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    blocks, good = good_jobs()
    engine.decode([*good[:2], odd, *good[2:]], verify="full")
    assert odd.out.numpy().tobytes() == content
    assert [done.out.numpy().tobytes() for done in good] == [block.tobytes() for block in blocks]
    assert sum(slices for name, slices in nvcomp.calls) == sum(
        size < length for one in good for size, length in _slices(one)
    )
    assert engine.health.wrong_blocks == 0 and engine.health.unusable is None, "the GPU is not to blame"


def _slices(one: DecodeJob) -> list[tuple[int, int]]:
    lengths = [piece.nbytes for piece in one.chain.layout(one.out.numel(), one.row.flags) if piece.coded]
    return list(zip(one.row.slice_nbytes, lengths, strict=True))


def test_slices_that_are_stored_are_no_frames() -> None:
    noise = np.random.default_rng(1).integers(0, 256, 3 * SLICE, np.uint8)
    encoded = cpu_encode(noise, ZSTD)
    assert encoded.row.slice_nbytes == (SLICE,) * 3
    assert engine_on(StandInDevice(ReferenceKernels()))._checks.frame_faults([job(encoded, ZSTD)]) == {}


def test_the_right_block_of_many_is_found() -> None:
    """Blocks of one read lie next to each other, those that were read again elsewhere."""
    chain = CodecChain(Planes(2), Zstd(1024))
    encoded = [cpu_encode(weights(2, 6000, seed=seed), chain) for seed in range(12)]
    memory = memoryview(b"".join(bytes(one.data) for one in encoded))
    starts = np.cumsum([0, *(one.data.nbytes for one in encoded)]).tolist()
    jobs = [
        DecodeJob(memory[start:stop] if at % 5 else memoryview(bytes(one.data)), one.row, chain, job(one, chain).out)
        for at, (one, start, stop) in enumerate(zip(encoded, starts[:-1], starts[1:], strict=True))
    ]
    checks = engine_on(StandInDevice(ReferenceKernels()))._checks
    assert checks.frame_faults(jobs) == {}
    for bad in range(12):
        data = bytearray(jobs[bad].data)
        data[data.index(b"\x28\xb5\x2f\xfd") + 4] ^= 8
        changed = [*jobs]
        changed[bad] = DecodeJob(memoryview(data), jobs[bad].row, chain, jobs[bad].out)
        assert [*checks.frame_faults(changed)] == [bad]
