"""Frames that are none, or odd ones, in blocks whose CRC is right: nvCOMP never sees them, the CPU engine judges."""

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
def test_what_is_no_frame_is_refused_before_nvcomp_sees_it(frame: bytes, chain: CodecChain) -> None:
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    with pytest.raises(CorruptDataError, match=r"slice.*x\.distcp.*'w'.*16 to 32"):
        engine.decode([block_of([frame], bytes(SLICE), chain)], verify="stored")
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
    assert engine.health.wrong_blocks == 0 and engine.health.unusable is None, "the GPU is not to blame"


def test_the_right_block_of_many_is_found() -> None:
    for coder, at, bits in ((Zstd(1024), 4, 8), (Deflate(1024), 0, 6)):
        chain = CodecChain(Bytes(), coder)
        blocks = [np.tile(weights(2, 300, seed=seed), 9) for seed in range(12)]
        encoded = [cpu_encode(block, chain) for block in blocks]
        for bad in range(0, 12, 5):
            engine = engine_on(StandInDevice(ReferenceKernels()))
            jobs = [job(one, chain) for one in encoded]
            data = bytearray(jobs[bad].data)
            data[at] |= bits
            row = jobs[bad].row._replace(encoded_crc=checksum(memoryview(data)))
            jobs[bad] = DecodeJob(memoryview(data), row, chain, jobs[bad].out, byte_range=(bad, bad + 1))
            with pytest.raises(CorruptDataError) as caught:
                engine.decode(jobs, verify="stored")
            assert caught.value.byte_range == (bad, bad + 1)
            assert engine.health.wrong_blocks == 0, "the GPU is not to blame"
