"""The CUDA engine on a CPU: its own code throughout, with stand-ins for the GPU and for nvCOMP below it.

What it encodes the CPU engine must decode bit for bit, and the reverse.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.engines.base import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda import CudaEngine
from dcp_nvcomp.engines.cuda_batches import fitting, size_classes
from dcp_nvcomp.engines.cuda_device import Kernels

from .cases import BUDGET, SLICE, U8, cpu_encode, encode, engine_on, job, tensor, weights
from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import NvcompStandIn, StandInDevice


@pytest.fixture
def engine(kernels: Kernels) -> CudaEngine:
    return engine_on(StandInDevice(kernels))


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
