"""The CUDA engine on a CPU: a GPU that fails, nvCOMP of another version, and bytes that are not what they should be."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.base import BlockRow, EncodedBlock, checksum
from dcp_nvcomp.codecs.transforms import PLANE_NAMES
from dcp_nvcomp.engines.cuda.device import Kernels
from dcp_nvcomp.engines.cuda.engine import CudaEngine, DecodeJob, EncodeJob
from dcp_nvcomp.errors import CodecUnavailableError, CorruptDataError, UnsupportedVersionError

from .cases import (
    CHAIN,
    OWN,
    SLICE,
    U8,
    assert_nothing_held,
    cpu_encode,
    decoded,
    encode,
    engine_on,
    job,
    tensor,
    weights,
)
from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import Codec, NvcompStandIn, StandInDevice


@pytest.fixture
def engine(kernels: Kernels) -> CudaEngine:
    return engine_on(StandInDevice(kernels))


# ---- when the GPU fails ----------------------------------------------------------------------------------------------


def some_blocks(count: int) -> tuple[list[U8], list[torch.Tensor]]:
    blocks = [weights(4, 2500, seed=seed) for seed in range(count)]
    return blocks, [tensor(block) for block in blocks]


def assert_reads(blocks: Sequence[U8], encoded: Sequence[EncodedBlock], chain: CodecChain = CHAIN) -> None:
    for block, one in zip(blocks, encoded, strict=True):
        assert decoded(one, chain) == block.tobytes()


def test_out_of_memory_makes_batches_smaller() -> None:
    blocks, tensors = some_blocks(16)
    device = StandInDevice(ReferenceKernels(), capacity_nbytes=700_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoded = encode(engine := engine_on(device), tensors, CHAIN)
    assert_reads(blocks, encoded)
    assert 1 < sum(name == "encode" for name, _ in device.nvcomp.calls) < 16
    assert_nothing_held(engine, device)
    jobs = [job(one, CHAIN) for one in encoded]
    device.capacity_nbytes = 200_000
    engine.decode(jobs, verify="full")
    assert all(done.out.numpy().tobytes() == block.tobytes() for done, block in zip(jobs, blocks, strict=True))
    assert_nothing_held(engine, device)


def test_the_cpu_engine_takes_what_the_gpu_has_no_memory_for() -> None:
    blocks, tensors = some_blocks(6)
    device = StandInDevice(ReferenceKernels(), capacity_nbytes=5000)
    engine = engine_on(device)
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError") as caught:
        encoded = encode(engine, tensors, CHAIN)
    assert len(caught) == 1
    jobs = [job(one, CHAIN) for one in encoded]
    engine.decode(jobs, verify="full")  # no second warning, which would be an error here
    assert_reads(blocks, encoded)
    assert all(done.out.numpy().tobytes() == block.tobytes() for done, block in zip(jobs, blocks, strict=True))


@pytest.mark.parametrize("error", [RuntimeError("nvCOMP error: internal"), ValueError("too small"), MemoryError()])
def test_nvcomp_errors_leave_the_block_to_the_cpu_engine(error: Exception) -> None:
    calls = 0

    def every_other_fails(name: str, slices: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise error

    blocks, tensors = some_blocks(5)
    engine = engine_on(StandInDevice(ReferenceKernels(), NvcompStandIn(every_other_fails)))
    with pytest.warns(RuntimeWarning, match="CPU engine"):
        encoded = encode(engine, tensors, CHAIN)
    jobs = [job(one, CHAIN) for one in encoded]
    engine.decode(jobs, verify="stored")
    assert_reads(blocks, encoded)
    assert all(done.out.numpy().tobytes() == block.tobytes() for done, block in zip(jobs, blocks, strict=True))


def mixed_jobs(*coders: Ans) -> tuple[list[U8], list[EncodeJob]]:
    chains = [CHAIN, OWN, CodecChain(Bytes()), CodecChain(Bytes(), Zstd(SLICE))]
    chains += [CodecChain(Bytes(), coder) for coder in coders]
    blocks, tensors = some_blocks(4 * len(chains))
    return blocks, [EncodeJob((one,), chain) for one, chain in zip(tensors, chains * 4, strict=True)]


def encode_jobs(engine: CudaEngine, jobs: Sequence[EncodeJob]) -> list[EncodedBlock]:
    return engine.encode(jobs, memoryview(bytearray(sum(job.chain.max_encoded_nbytes(job.nbytes) for job in jobs))))


@pytest.mark.parametrize(("capacity", "falls_back"), [(200_000, False), (30_000, True)])
def test_mixed_chains_without_memory(capacity: int, falls_back: bool) -> None:
    blocks, jobs = mixed_jobs()
    device = StandInDevice(ReferenceKernels(), capacity_nbytes=capacity)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        encoded = encode_jobs(engine := engine_on(device), jobs)
    assert len(caught) == falls_back
    assert device.nvcomp.calls, "some of it on the GPU"
    for block, one, given in zip(blocks, encoded, jobs, strict=True):
        assert_reads([block], [one], given.chain)
    assert_nothing_held(engine, device)


def test_ans_among_others_has_nothing_to_fall_back_on() -> None:
    def fail(name: str, slices: int) -> None:
        raise RuntimeError("nvCOMP error: internal")

    _, jobs = mixed_jobs(Ans(SLICE, "<f4", "6.0.0"))
    engine = engine_on(StandInDevice(ReferenceKernels(), NvcompStandIn(fail)))
    with pytest.warns(RuntimeWarning), pytest.raises(CodecUnavailableError, match="device_memory_budget"):
        encode_jobs(engine, jobs)


def test_ans_has_nothing_to_fall_back_on() -> None:
    def fail(name: str, slices: int) -> None:
        raise RuntimeError("nvCOMP error: internal")

    nvcomp = NvcompStandIn()
    chain = CodecChain(Bytes(), Ans(SLICE, "<f4", "6.0.0"))
    _, tensors = some_blocks(3)
    encoded = encode(engine_on(StandInDevice(ReferenceKernels(), nvcomp)), tensors, chain)
    engine = engine_on(StandInDevice(ReferenceKernels(), NvcompStandIn(fail)))
    with pytest.raises(CodecUnavailableError, match="device_memory_budget"):
        encode(engine, tensors, chain)
    with pytest.raises(CodecUnavailableError, match="device_memory_budget"):
        engine.decode([job(one, chain) for one in encoded], verify="stored")


def test_ans_that_comes_out_wrong_is_an_error_that_says_so() -> None:
    """More memory would not help."""

    class WrongAns(NvcompStandIn):
        def Codec(self, **options: Any) -> Codec:  # noqa: N802
            made = super().Codec(**options)
            encode_slice = made._encode_slice
            made._encode_slice = lambda source: encode_slice(source ^ 1)  # type: ignore[method-assign]
            return made

    chain = CodecChain(Bytes(), Ans(SLICE, "<f4", "6.0.0"))
    _, tensors = some_blocks(3)
    with pytest.raises(CodecUnavailableError, match=r"wrong bytes.*found before.*codec='auto'") as caught:
        encode(engine_on(StandInDevice(ReferenceKernels(), WrongAns())), tensors, chain)
    assert "memory" not in str(caught.value)


def test_a_gpu_that_fails_altogether_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _, tensors = some_blocks(1)
    monkeypatch.setattr(StandInDevice, "copy_out", fails)
    monkeypatch.setattr(torch.Tensor, "cpu", fails)  # nor does torch copy any more
    with pytest.warns(RuntimeWarning), pytest.raises(CodecUnavailableError, match="illegal memory access"):
        encode(engine_on(StandInDevice(ReferenceKernels())), tensors, CHAIN)


# ---- ANS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_type", "nbytes"), [("|u1", 4099), ("<f2", 4098), ("<f4", 4100), ("|f1", 4099), ("<f4", 4099)]
)
def test_ans(engine: CudaEngine, data_type: str, nbytes: int) -> None:
    chain = CodecChain(Bytes(), Ans(SLICE, data_type, "6.0.0"))
    block = np.zeros(nbytes, np.uint8)
    (encoded,) = encode(engine, [tensor(block, 1)], chain)
    assert encoded.row.slice_nbytes[0] < SLICE
    # 3 bytes are not a whole number of floats of 4: nvCOMP can't take them
    assert encoded.row.slice_nbytes[-1] == nbytes - 4 * SLICE
    done = job(encoded, chain)
    engine.decode([done], verify="full")
    assert not done.out.any()


@pytest.mark.parametrize(
    ("version", "good"), [("6.0.0", True), ("6.3.1", True), ("5.1.0", False), ("7.0.0", False), ("", False)]
)
def test_ans_of_another_major_version_is_refused(engine: CudaEngine, version: str, good: bool) -> None:
    ours = CodecChain(Bytes(), Ans(SLICE, "|u1", "6.0.0"))
    (encoded,) = encode(engine, [tensor(np.zeros(3000, np.uint8))], ours)
    theirs = job(encoded, CodecChain(Bytes(), Ans(SLICE, "|u1", version)))
    if good:
        engine.decode([theirs], verify="stored")
        return
    message = f"nvidia-nvcomp-cu13=={version[:1]}" if version else "not recorded"
    with pytest.raises(UnsupportedVersionError, match=message):
        engine.decode([theirs], verify="stored")


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def good() -> tuple[U8, EncodedBlock]:
    block = weights(4, 3000)
    return block, cpu_encode(block, CHAIN)


def resealed(encoded: EncodedBlock, data: bytes | None = None, **row: object) -> DecodeJob:
    """A job of other bytes or rows whose CRC is right, as an attacker or a bug could make it."""
    held = memoryview(bytes(encoded.data) if data is None else data)
    changed = encoded.row._replace(encoded_crc=checksum(held), **row)  # type: ignore[arg-type]
    out = torch.empty(encoded.uncompressed_nbytes, dtype=torch.uint8)
    return DecodeJob(held, changed, CHAIN, out, path="run/x.distcp", fqn="w", byte_range=(16, 32))


@pytest.mark.parametrize("position", [0, 5000, -1])
def test_a_flipped_byte_never_reaches_the_gpu(good: tuple[U8, EncodedBlock], position: int) -> None:
    _, encoded = good
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    data = bytearray(encoded.data)
    data[position] ^= 1
    bad = replace(job(encoded, CHAIN), data=memoryview(data), path="run/x.distcp", fqn="w", byte_range=(16, 32))
    with pytest.raises(CorruptDataError, match=r"CRC.*x\.distcp.*'w'.*16 to 32"):
        engine.decode([job(encoded, CHAIN), bad], verify="stored")
    assert nvcomp.calls == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"slice_nbytes": (1,)}, "slices"),
        ({"slice_nbytes": (900, 900, 953)}, "does not fit"),
        ({"slice_nbytes": (1025, 900, 900)}, "does not fit"),
        ({"slice_nbytes": (900, 0, 900)}, "does not fit"),
        ({"slice_nbytes": (1 << 31, 900, 900)}, "does not fit"),
        ({"flags": 2}, "flags"),
        ({"flags": 4}, "flags"),
        ({"flags": 1 << 31}, "flags"),
    ],
)
def test_rows_that_make_no_sense(good: tuple[U8, EncodedBlock], row: dict[str, object], message: str) -> None:
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    with pytest.raises(CorruptDataError, match=message):
        engine.decode([resealed(good[1], **row)], verify="off")
    assert nvcomp.calls == []


def test_a_cut_block(good: tuple[U8, EncodedBlock]) -> None:
    engine = engine_on(StandInDevice(ReferenceKernels()))
    with pytest.raises(CorruptDataError, match="shorter"):
        engine.decode([resealed(good[1], bytes(good[1].data[:-16]))], verify="stored")


def test_half_a_float(good: tuple[U8, EncodedBlock]) -> None:
    engine = engine_on(StandInDevice(ReferenceKernels()))
    bad = replace(resealed(good[1]), out=torch.empty(11999, dtype=torch.uint8))
    with pytest.raises(CorruptDataError, match="whole number"):
        engine.decode([bad], verify="stored")


def test_more_padding_is_fine(good: tuple[U8, EncodedBlock]) -> None:
    block, encoded = good
    more = resealed(encoded, bytes(encoded.data) + bytes(4096 - 16))
    engine_on(StandInDevice(ReferenceKernels())).decode([more], verify="full")
    assert more.out.numpy().tobytes() == block.tobytes()


def with_first_slice(encoded: EncodedBlock, frame: bytes) -> DecodeJob:
    start = sum(-(-piece.nbytes // 16) * 16 for piece in CHAIN.layout(12000, 0) if not piece.coded)
    old = -(-encoded.row.slice_nbytes[0] // 16) * 16
    padded_frame = frame.ljust(-(-len(frame) // 16) * 16, b"\0")
    data = bytes(encoded.data[:start]) + padded_frame + bytes(encoded.data[start + old :])
    return resealed(encoded, data, slice_nbytes=(len(frame), *encoded.row.slice_nbytes[1:]))


@pytest.mark.parametrize(
    "frame",
    [zlib.compress(bytes(1000), wbits=-15), zlib.compress(bytes(5000), wbits=-15), b"\7\0"],
    ids=["short", "long", "none"],
)
def test_a_slice_that_decodes_to_something_else(good: tuple[U8, EncodedBlock], frame: bytes) -> None:
    engine = engine_on(StandInDevice(ReferenceKernels()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nvCOMP fails, the CPU engine says what is wrong
        with pytest.raises(CorruptDataError, match=r"slice.*x\.distcp"):
            engine.decode([with_first_slice(good[1], frame)], verify="stored")


def test_full_verification(kernels: Kernels, good: tuple[U8, EncodedBlock]) -> None:
    engine = engine_on(StandInDevice(kernels))
    other = with_first_slice(good[1], zlib.compress(bytes(SLICE), wbits=-15))
    engine.decode([other], verify="stored")
    with pytest.raises(CorruptDataError, match=r"decoded bytes fail.*'w'"):
        engine.decode([other], verify="full")


def test_packed_rest_may_not_be_coded() -> None:
    chain = CodecChain(Planes(2, PLANE_NAMES[1:]), Zstd(SLICE))
    row = BlockRow(1, (500, 500), checksum(bytes(4096)), 0)
    bad = DecodeJob(memoryview(bytes(4096)), row, chain, torch.empty(2000, dtype=torch.uint8))
    with pytest.raises(CorruptDataError, match="flags"):
        engine_on(StandInDevice(ReferenceKernels())).decode([bad], verify="off")
