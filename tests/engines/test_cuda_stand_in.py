"""The CUDA engine on a CPU: its own code throughout, with stand-ins for the GPU and for nvCOMP below it.

What it encodes the CPU engine must decode bit for bit, and the reverse.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.planes import PLANE_NAMES
from dcp_nvcomp.engines.base import BlockRow, EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine, checksum
from dcp_nvcomp.engines.cuda import CudaEngine, DecodeJob
from dcp_nvcomp.engines.cuda_batches import fitting, size_classes
from dcp_nvcomp.engines.cuda_device import Kernels
from dcp_nvcomp.engines.cuda_support import cuda_unavailable_reason, find_reason, nvcomp_version
from dcp_nvcomp.errors import CodecUnavailableError, CorruptDataError, UnsupportedVersionError

from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import NvcompStandIn, StandInDevice

BUDGET = 64 << 20
SLICE = 1024

U8 = np.ndarray


def engine_on(device: StandInDevice, budget: int = BUDGET) -> CudaEngine:
    return CudaEngine(torch.device("cpu"), device_memory_budget=budget, backend=device)


@pytest.fixture
def engine(kernels: Kernels) -> CudaEngine:
    return engine_on(StandInDevice(kernels))


def weights(width: int, count: int, *, signs: str = "mixed", seed: int = 0) -> U8:
    """Bits like those of trained floats: skewed exponents, random mantissas."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, count)
    values = {"mixed": values, "positive": np.abs(values), "negative": -np.abs(values)}[signs]
    if width == 8:
        return values.view(np.uint8)
    single = values.astype(np.float32)
    if width == 4:
        return single.view(np.uint8)
    return (single.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def tensor(block: U8, misaligned: int = 0) -> torch.Tensor:
    """The block as a tensor that begins so far from a multiple of 16."""
    memory = torch.zeros(block.size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + misaligned
    memory[start : start + block.size] = torch.from_numpy(block)
    return memory[start : start + block.size]


def encode(engine: CudaEngine, blocks: Sequence[torch.Tensor], chain: CodecChain) -> list[EncodedBlock]:
    out = memoryview(bytearray(sum(chain.max_encoded_nbytes(block.numel()) for block in blocks)))
    encoded = engine.encode(blocks, chain, out)
    assert b"".join(block.data for block in encoded) == out[: sum(block.data.nbytes for block in encoded)]
    return encoded


def cpu_encode(block: U8, chain: CodecChain) -> EncodedBlock:
    return CpuEngine().encode(block, chain, memoryview(bytearray(chain.max_encoded_nbytes(block.size))))


def job(encoded: EncodedBlock, chain: CodecChain, misaligned: int = 0) -> DecodeJob:
    out = tensor(np.full(encoded.uncompressed_nbytes, 0xEE, np.uint8), misaligned)
    return DecodeJob(encoded.data, encoded.row, chain, out)


@st.composite
def chains(draw: st.DrawFn) -> CodecChain:
    width = draw(st.sampled_from([0, 2, 4, 8]))
    coders = [Zstd(SLICE), Zstd(SLICE, literals_only=True), Deflate(SLICE), Deflate(SLICE, 1, True)]
    coder = draw(st.sampled_from(coders))
    if width == 0:
        return CodecChain(Bytes(), draw(st.sampled_from([coder, None])))
    names = Planes(width).plane_names
    coded = tuple(name for name in names if draw(st.booleans()))
    return CodecChain(Planes(width, coded), coder if coded else None)


@st.composite
def batches(draw: st.DrawFn) -> tuple[CodecChain, list[U8], list[int]]:
    chain = draw(chains())
    width = chain.array_to_bytes.float_nbytes if isinstance(chain.array_to_bytes, Planes) else 1
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 40) | st.integers(1000, 2100))
        signs = draw(st.sampled_from(["mixed", "positive", "negative"]))
        seed = draw(st.integers(0, 1 << 20))
        if draw(st.booleans()):
            blocks.append(weights(max(width, 2), count, signs=signs, seed=seed)[: count * width])
        else:  # random bits, whose slices do not shrink
            blocks.append(np.random.default_rng(seed).integers(0, 256, count * width, np.uint8))
    return chain, blocks, [draw(st.sampled_from([0, 0, 1, 2, 4, 8])) for _ in blocks]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches(), budget=st.sampled_from([1, 40 << 10, BUDGET]))
def test_the_cpu_engine_reads_it(kernels: Kernels, batch: tuple[CodecChain, list[U8], list[int]], budget: int) -> None:
    chain, blocks, misaligned = batch
    tensors = [tensor(block, by) for block, by in zip(blocks, misaligned, strict=True)]
    encoded = encode(engine_on(StandInDevice(kernels), budget), tensors, chain)
    for block, found in zip(blocks, encoded, strict=True):
        out = np.full_like(block, 0xEE)
        CpuEngine().decode(found.data, found.row, chain, out, verify="full")
        assert out.tobytes() == block.tobytes()
        expected = cpu_encode(block, chain)
        assert found.row.flags == expected.row.flags
        assert found.row.uncompressed_crc == expected.row.uncompressed_crc
        assert len(found.row.slice_nbytes) == len(expected.row.slice_nbytes)
        assert found.uncompressed_nbytes == block.size
        assert found.data.nbytes % 16 == 0
        if chain.coder is None:
            assert found.data == expected.data
        assert_padding_is_zero(found, chain)


def assert_padding_is_zero(encoded: EncodedBlock, chain: CodecChain) -> None:
    sizes, position = iter(encoded.row.slice_nbytes), 0
    for piece in chain.layout(encoded.uncompressed_nbytes, encoded.row.flags):
        stop = position + (next(sizes) if piece.coded else piece.nbytes)
        position = -(-stop // 16) * 16
        assert not any(encoded.data[stop:position])
    assert position == encoded.data.nbytes


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=batches(), budget=st.sampled_from([1, 40 << 10, BUDGET]), verify=st.sampled_from(["stored", "full", "off"])
)
def test_it_reads_the_cpu_engine(
    kernels: Kernels, batch: tuple[CodecChain, list[U8], list[int]], budget: int, verify: str
) -> None:
    chain, blocks, misaligned = batch
    encoded = [cpu_encode(block, chain) for block in blocks]
    jobs = [job(one, chain, by) for one, by in zip(encoded, misaligned, strict=True)]
    engine_on(StandInDevice(kernels), budget).decode(jobs, verify=verify)
    for block, done in zip(blocks, jobs, strict=True):
        assert done.out.numpy().tobytes() == block.tobytes()


def test_blocks_of_different_chains_decode_together(engine: CudaEngine) -> None:
    made = [
        (CodecChain(Planes(2), Zstd(SLICE)), weights(2, 3000)),
        (CodecChain(Bytes()), np.arange(77, dtype=np.uint8)),
        (CodecChain(Planes(4, ("rest", "exponent")), Deflate(SLICE)), weights(4, 999)),
        (CodecChain(Bytes(), Zstd(2 * SLICE)), np.zeros(5000, np.uint8)),
        (CodecChain(Planes(8, ()), None), weights(8, 500, signs="negative")),
        (CodecChain(Bytes(), Ans(SLICE, "|u1", "6.0.0")), np.zeros(4000, np.uint8)),
    ]
    encoded = [encode(engine, [tensor(block)], chain)[0] for chain, block in made]
    jobs = [job(one, chain) for one, (chain, _) in zip(encoded, made, strict=True)]
    engine.decode(jobs, verify="full")
    for done, (_, block) in zip(jobs, made, strict=True):
        assert done.out.numpy().tobytes() == block.tobytes()


def test_nothing_to_do(engine: CudaEngine) -> None:
    assert engine.encode([], CodecChain(Bytes()), memoryview(b"")) == []
    engine.decode([], verify="full")


@pytest.mark.parametrize("coder", [None, Zstd(SLICE)])
def test_an_empty_block(engine: CudaEngine, coder: Zstd | None) -> None:
    chain = CodecChain(Bytes(), coder)
    blocks = [np.zeros(0, np.uint8), np.zeros(2000, np.uint8)]
    encoded = encode(engine, [tensor(block) for block in blocks], chain)
    assert encoded[0] == cpu_encode(blocks[0], chain)
    jobs = [job(one, chain) for one in encoded]
    engine.decode(jobs, verify="full")
    assert not jobs[1].out.any()


def test_many_small_blocks_are_few_calls() -> None:
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    chain = CodecChain(Planes(2), Zstd(128 << 10))
    blocks = [weights(2, 512, seed=seed) for seed in range(300)]
    encoded = encode(engine, [tensor(block) for block in blocks], chain)
    assert nvcomp.calls == [("encode", 300)]
    engine.decode([job(one, chain) for one in encoded], verify="full")
    assert nvcomp.calls == [("encode", 300), ("decode", 300)]


# ---- budget ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain", [CodecChain(Planes(2), Zstd(4096)), CodecChain(Bytes(), Deflate(4096, 1, True)), CodecChain(Bytes())]
)
def test_a_batch_keeps_to_the_budget(chain: CodecChain) -> None:
    blocks = [weights(2, 8192 - 7 * seed, seed=seed) for seed in range(40)]
    budget = 700 << 10
    device = StandInDevice(ReferenceKernels())
    engine = engine_on(device, budget)
    encoded = encode(engine, [tensor(block) for block in blocks], chain)
    assert device.held_nbytes == 0
    assert budget // 4 < device.peak_nbytes <= budget
    device.peak_nbytes = 0
    jobs = [job(one, chain) for one in encoded]
    engine.decode(jobs, verify="full")
    assert device.held_nbytes == 0
    assert device.peak_nbytes <= budget
    assert all(done.out.numpy().tobytes() == block.tobytes() for done, block in zip(jobs, blocks, strict=True))


def test_the_guess_of_nvcomps_own_memory_is_corrected() -> None:
    class Hungry(NvcompStandIn):
        def allocate(self, nbytes: int) -> list[object]:
            return super().allocate(20 * nbytes)

    device = StandInDevice(ReferenceKernels(), Hungry())
    engine, chain = engine_on(device, 4 << 20), CodecChain(Bytes(), Zstd(4096))
    blocks = [tensor(weights(2, 8192, seed=seed)) for seed in range(60)]
    encode(engine, blocks[:2], chain)
    device.peak_nbytes = 0
    encode(engine, blocks, chain)
    assert device.peak_nbytes <= 4 << 20


def test_fitting() -> None:
    assert fitting([5, 5, 5], 0, 3, 10) == 2
    assert fitting([5, 5, 5], 2, 3, 10) == 1
    assert fitting([50, 5], 0, 2, 10) == 1
    assert fitting([5, 5, 5], 0, 1, 100) == 1


def test_size_classes_bound_the_room_they_take() -> None:
    lengths = np.array([131072, 40000, 20000, 5000, 1, 131072, 3000], np.int64)
    groups = size_classes(lengths, 131072)
    assert sorted(np.concatenate([members for _, members in groups]).tolist()) == list(range(lengths.size))
    for ceiling, members in groups:
        assert (lengths[members] <= ceiling).all()
        assert ceiling <= 4096 or (4 * lengths[members] >= ceiling).all()


# ---- when the GPU fails ----------------------------------------------------------------------------------------------


def some_blocks(count: int) -> tuple[list[U8], list[torch.Tensor]]:
    blocks = [weights(4, 2500, seed=seed) for seed in range(count)]
    return blocks, [tensor(block) for block in blocks]


CHAIN = CodecChain(Planes(4), Zstd(SLICE))


def assert_reads(blocks: Sequence[U8], encoded: Sequence[EncodedBlock], chain: CodecChain = CHAIN) -> None:
    for block, one in zip(blocks, encoded, strict=True):
        out = np.empty_like(block)
        CpuEngine().decode(one.data, one.row, chain, out, verify="full")
        assert out.tobytes() == block.tobytes()


def test_out_of_memory_makes_batches_smaller() -> None:
    blocks, tensors = some_blocks(16)
    device = StandInDevice(ReferenceKernels(), capacity_nbytes=300_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoded = encode(engine_on(device), tensors, CHAIN)
    assert_reads(blocks, encoded)
    assert 1 < len(device.nvcomp.calls) < 16
    jobs = [job(one, CHAIN) for one in encoded]
    device.capacity_nbytes = 100_000
    engine_on(device).decode(jobs, verify="full")
    assert all(done.out.numpy().tobytes() == block.tobytes() for done, block in zip(jobs, blocks, strict=True))
    assert device.held_nbytes == 0


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


def test_a_gpu_that_fails_altogether_is_a_clear_error() -> None:
    class Dead(StandInDevice):
        def copy_out(self, source: torch.Tensor, host: memoryview) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _, tensors = some_blocks(1)
    with pytest.warns(RuntimeWarning), pytest.raises(CodecUnavailableError, match="illegal memory access"):
        encode(engine_on(Dead(ReferenceKernels())), tensors, CHAIN)


# ---- ANS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_type", "nbytes"), [("|u1", 4099), ("<f2", 4098), ("<f4", 4100), ("|f1", 4099), ("<f4", 4099)]
)
def test_ans(engine: CudaEngine, data_type: str, nbytes: int) -> None:
    chain = engine.complete(CodecChain(Bytes(), Ans(SLICE, data_type)))
    assert chain.to_json()[1]["configuration"]["nvcomp_version"] == "6.0.0"
    block = np.zeros(nbytes, np.uint8)
    (encoded,) = encode(engine, [tensor(block, 1)], chain)
    assert encoded.row.slice_nbytes[0] < SLICE
    # 3 bytes are not a whole number of floats of 4: nvCOMP can't take them
    assert encoded.row.slice_nbytes[-1] == nbytes - 4 * SLICE
    done = job(encoded, chain)
    engine.decode([done], verify="full")
    assert not done.out.any()


def test_other_chains_are_complete_as_they_are(engine: CudaEngine) -> None:
    assert engine.complete(CHAIN) is CHAIN


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
    changed = replace(encoded.row, encoded_crc=checksum(held), **row)  # type: ignore[arg-type]
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
        ({"slice_nbytes": (900, 900, 953)}, "room"),
        ({"slice_nbytes": (1025, 900, 900)}, "room"),
        ({"slice_nbytes": (900, 0, 900)}, "room"),
        ({"slice_nbytes": (1 << 31, 900, 900)}, "room"),
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


@pytest.mark.parametrize("frame", [zstandard.compress(bytes(1000)), zstandard.compress(bytes(5000)), b"no zstd frame"])
def test_a_slice_that_decodes_to_something_else(good: tuple[U8, EncodedBlock], frame: bytes) -> None:
    engine = engine_on(StandInDevice(ReferenceKernels()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nvCOMP fails, the CPU engine says what is wrong
        with pytest.raises(CorruptDataError, match=r"slice.*x\.distcp"):
            engine.decode([with_first_slice(good[1], frame)], verify="stored")


def test_full_verification(kernels: Kernels, good: tuple[U8, EncodedBlock]) -> None:
    engine = engine_on(StandInDevice(kernels))
    other = with_first_slice(good[1], zstandard.compress(bytes(SLICE)))
    engine.decode([other], verify="stored")
    with pytest.raises(CorruptDataError, match=r"decoded bytes fail.*'w'"):
        engine.decode([other], verify="full")


def test_packed_rest_may_not_be_coded() -> None:
    chain = CodecChain(Planes(2, PLANE_NAMES[1:]), Zstd(SLICE))
    row = BlockRow(1, (500, 500), 0, 0)
    bad = DecodeJob(memoryview(bytes(4096)), row, chain, torch.empty(2000, dtype=torch.uint8))
    with pytest.raises(CorruptDataError, match="flags"):
        engine_on(StandInDevice(ReferenceKernels())).decode([bad], verify="off")


# ---- what is installed -----------------------------------------------------------------------------------------------


class Installed:
    def __init__(self, version: str) -> None:
        self.__version__ = version


def missing() -> Installed:
    raise ModuleNotFoundError("No module named 'nvidia'")


def broken() -> Installed:
    raise OSError("libnvcomp.so.6: cannot open shared object file")


def test_reasons() -> None:
    def six() -> Installed:
        return Installed("6.0.0")

    assert find_reason("13.0", 1, six, six) is None
    assert "built without CUDA" in str(find_reason(None, 0, six, six))
    assert "no CUDA device" in str(find_reason("13.0", 0, six, six))
    assert "pip install 'dcp-nvcomp[cu13]'" in str(find_reason("13.0", 1, missing, six))
    assert "nvidia-nvcomp-cu12 is not installed" in str(find_reason("12.8", 1, missing, six))
    assert "cupy-cuda12x is not installed" in str(find_reason("12.8", 1, six, missing))
    assert "does not load (OSError: libnvcomp" in str(find_reason("13.0", 1, broken, six))
    assert "nvCOMP 5.1.0 is installed, but version 6" in str(find_reason("13.0", 1, lambda: Installed("5.1.0"), six))


def test_here() -> None:
    reason = cuda_unavailable_reason()
    if torch.version.cuda is None:
        assert reason is not None and "built without CUDA" in reason
    if reason is not None:
        with pytest.raises(CodecUnavailableError, match="can't run here"):
            CudaEngine(torch.device("cuda"), device_memory_budget=1)


def test_nvcomp_version() -> None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nvcomp") is None:
        with pytest.raises(CodecUnavailableError, match="pip install"):
            nvcomp_version()
    else:
        assert nvcomp_version().split(".")[0].isdigit()
