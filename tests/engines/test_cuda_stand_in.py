"""The CUDA engine on a CPU: its own code throughout, with stand-ins for the GPU and for nvCOMP below it.

What it encodes the CPU engine must decode bit for bit, and the reverse.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.engines.cuda.arena import NvcompMemory
from dcp_nvcomp.engines.cuda.batches import RowTable, fitting, size_classes
from dcp_nvcomp.engines.cuda.coders import NvcompCoders
from dcp_nvcomp.engines.cuda.device import Kernels
from dcp_nvcomp.engines.cuda.encode import BatchEncoder
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EncodeJob
from tests.effort import examples

from .cases import BUDGET, SLICE, U8, assert_nothing_held, cpu_encode, decoded, encode, engine_on, job, tensor, weights
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


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches(), budget=st.sampled_from([1, 40 << 10, BUDGET]))
def test_the_cpu_engine_reads_it(kernels: Kernels, batch: tuple[CodecChain, list[U8], list[int]], budget: int) -> None:
    chain, blocks, misaligned = batch
    tensors = [tensor(block, by) for block, by in zip(blocks, misaligned, strict=True)]
    encoded = encode(engine_on(StandInDevice(kernels), budget), tensors, chain)
    for block, found in zip(blocks, encoded, strict=True):
        assert decoded(found, chain) == block.tobytes()
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


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


def test_short_slices_of_literals_are_libzstds_and_take_its_memory(lost_warnings: list[str]) -> None:
    chain, block = CodecChain(Planes(4, ("low", "exponent")), Zstd(SLICE, literals_only=True)), weights(4, 1000)
    done = job(cpu_encode(block, chain), chain)
    engine_on(StandInDevice(ReferenceKernels()), 1).decode([done], verify="stored")
    assert done.out.numpy().tobytes() == block.tobytes() and not lost_warnings


def mixed() -> list[tuple[CodecChain, U8]]:
    return [
        (CodecChain(Planes(2), Zstd(SLICE, literals_only=True)), weights(2, 3000)),
        (CodecChain(Bytes()), np.arange(77, dtype=np.uint8)),
        (CodecChain(Planes(4, ("rest", "exponent")), Deflate(SLICE)), weights(4, 999)),
        (CodecChain(Bytes(), Deflate(2 * SLICE)), np.zeros(5000, np.uint8)),
        (CodecChain(Planes(8, ()), None), weights(8, 500, signs="negative")),
        (CodecChain(Bytes(), Ans(SLICE, "|u1", "6.0.0")), np.zeros(4000, np.uint8)),
        (CodecChain(Planes(2), Zstd(SLICE, literals_only=True)), weights(2, 2000, signs="positive")),
    ]


class CountingKernels(ReferenceKernels):
    """Knows how often each kernel is launched."""

    def __init__(self) -> None:
        self.launched: Counter[str] = Counter()

    def inspect(self, blocks: RowTable, crc: torch.Tensor, seen: torch.Tensor) -> None:
        self.launched["inspect"] += 1
        super().inspect(blocks, crc, seen)

    def split(self, blocks: RowTable, seen: torch.Tensor, flags: torch.Tensor) -> None:
        self.launched["split"] += 1
        super().split(blocks, seen, flags)

    def copy(self, pieces: RowTable) -> None:
        self.launched["copy"] += 1
        super().copy(pieces)


class CountingDevice(StandInDevice):
    copies_out = 0

    def copy_out(self, source: torch.Tensor, host: memoryview) -> None:
        self.copies_out += 1
        super().copy_out(source, host)


def out_for(jobs: Sequence[EncodeJob]) -> memoryview:
    return memoryview(bytearray(sum(job.chain.max_encoded_nbytes(job.nbytes) for job in jobs)))


def assert_mixed(encoded: Sequence[EncodedBlock], made: Sequence[tuple[CodecChain, U8]]) -> None:
    for one, (chain, block) in zip(encoded, made, strict=True):
        if isinstance(chain.coder, Ans):  # only a GPU decodes it
            continue
        assert decoded(one, chain) == block.tobytes()


def test_blocks_of_different_chains_go_together(kernels: Kernels) -> None:
    made = mixed()
    engine = engine_on(StandInDevice(kernels))
    jobs = [EncodeJob((tensor(block),), chain) for chain, block in made]
    encoded = engine.encode(jobs, out_for(jobs))
    assert_mixed(encoded, made)
    back = [job(one, chain) for one, (chain, _) in zip(encoded, made, strict=True)]
    engine.decode(back, verify="full")
    for done, (_, block) in zip(back, made, strict=True):
        assert done.out.numpy().tobytes() == block.tobytes()


@pytest.mark.parametrize(
    ("check_encodes", "launches"),
    [
        # into scratch memory, and out of it; the source's CRCs and those of what goes to the file
        (False, {"inspect": 2, "split": 1, "copy": 2}),
        # and back again
        (True, {"inspect": 3, "split": 1, "copy": 4}),
    ],
)
def test_a_mixed_batch_is_one_launch_of_each_kernel_and_one_copy(check_encodes: bool, launches: dict[str, int]) -> None:
    kernels, nvcomp = CountingKernels(), NvcompStandIn()
    device = CountingDevice(kernels, nvcomp)
    made = mixed() * 20
    jobs = [EncodeJob((tensor(block),), chain) for chain, block in made]
    out = out_for(jobs)
    encoded = engine_on(device, check_encodes=check_encodes).encode(jobs, out)
    assert kernels.launched == launches
    assert device.copies_out == 1
    # one for each coder: our kernels, Deflate in slices of two lengths, ANS; short last slices have calls of their own
    calls = nvcomp.calls + nvcomp.kernel_calls
    assert sum(name == "encode" for name, _ in calls) <= 8
    assert sum(name == "decode" for name, _ in calls) == (4 if check_encodes else 0)
    # no gaps, so that one copy brings all of it
    assert sum(one.data.nbytes for one in encoded) <= len(out)
    starts = sorted(np.frombuffer(one.data, np.uint8).ctypes.data for one in encoded)
    assert starts[-1] - starts[0] < sum(one.data.nbytes for one in encoded)


@pytest.mark.parametrize("budget", [1, BUDGET])
def test_blocks_that_are_no_run_of_memory(kernels: Kernels, budget: int) -> None:
    """A strided tensor, and several tensors one after the other: copied on the device, within the budget."""
    chain = CodecChain(Planes(4), Zstd(SLICE, literals_only=True))
    wide = torch.randn(60, 50)
    parts = (torch.randn(700), torch.randn(3, 5).t(), torch.randn(()))
    jobs = [EncodeJob((wide.t(),), chain), EncodeJob(parts, chain)]
    encoded = engine_on(StandInDevice(kernels), budget).encode(jobs, out_for(jobs))
    expected = [wide.t().contiguous(), torch.cat([part.contiguous().reshape(-1) for part in parts])]
    assert_mixed(encoded, [(chain, one.reshape(-1).view(torch.uint8).numpy()) for one in expected])


def test_the_copy_of_a_strided_block_counts() -> None:
    engine = BatchEncoder(device := StandInDevice(ReferenceKernels()), NvcompCoders(device), None)
    plain, chain = torch.randn(64, 64), CodecChain(Bytes())
    jobs = [EncodeJob(tensors, chain) for tensors in ((plain,), (plain.t(),), (plain[:32], plain[32:]))]
    cost, *others = engine.costs_nbytes(jobs)
    assert others == [cost + plain.nbytes] * 2


def test_nothing_to_do(engine: CudaEngine) -> None:
    assert engine.encode([], memoryview(b"")) == []
    engine.decode([], verify="full")


@pytest.mark.parametrize("coder", [None, Zstd(SLICE), Zstd(SLICE, literals_only=True), Deflate(SLICE)])
def test_an_empty_block(engine: CudaEngine, coder: Zstd | Deflate | None) -> None:
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
    chain = CodecChain(Planes(2), Zstd(literals_only=True))
    blocks = [weights(2, 1500, seed=seed) for seed in range(300)]
    encoded = encode(engine, [tensor(block) for block in blocks], chain)
    assert nvcomp.kernel_calls == [("encode", 300), ("decode", 300)]
    engine.decode([job(one, chain) for one in encoded], verify="full")
    assert nvcomp.kernel_calls == [("encode", 300), ("decode", 300), ("decode", 300)] and nvcomp.calls == []


def test_what_nvcomp_wants_to_know_beforehand_is_made_once_for_a_shape() -> None:
    nvcomp, chain = NvcompStandIn(), CodecChain(Planes(2), Deflate(SLICE))
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    for nbytes, made in ((5000, 1), (5000, 1), (7000, 2), (5000, 2)):
        encoded = encode(engine, [tensor(weights(2, nbytes, seed=made))], chain)
        engine.decode([job(encoded[0], chain)], verify="full")
        assert nvcomp.configurations == made


class OfNobody:
    """Memory of no engine."""

    def __init__(self, nbytes: int, freed: list[int]) -> None:
        self.ptr = nbytes
        self._freed = freed

    def give_back(self) -> None:
        self._freed.append(self.ptr)


def test_nvcomps_memory_is_counted_whoever_gives_it_back() -> None:
    """Threads allocate for streams of their own; another thread, or the garbage collector, drops what they got."""
    freed: list[int] = []
    memory = NvcompMemory(lambda nbytes, stream: OfNobody(nbytes, freed))
    dropped: SimpleQueue[object] = SimpleQueue()

    def drop() -> None:
        while dropped.get() is not None:
            pass

    def allocate(stream: int) -> None:
        for nbytes in range(1, 3001):
            dropped.put(memory(nbytes, SimpleNamespace(ptr=stream)))

    droppers = [threading.Thread(target=drop) for _ in range(2)]
    allocators = [threading.Thread(target=allocate, args=(stream,)) for stream in (1, 2, 3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in (*droppers, *allocators):
            thread.start()
        for thread in allocators:
            thread.join()
        for _ in droppers:
            dropped.put(None)
        for thread in droppers:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(freed) == 9000
    assert [memory.reset_peak(stream) for stream in (1, 2, 3)] == [0, 0, 0]


def test_memory_may_be_given_back_inside_any_method() -> None:
    """The garbage collector runs wherever it likes, also while this thread holds the lock."""
    memory = NvcompMemory(lambda nbytes, stream: OfNobody(nbytes, []))
    stream = SimpleNamespace(ptr=7)
    held = memory(100, stream)
    with memory._lock:
        del held
    assert memory.reset_peak(7) == 0
    kept = memory(30, stream)
    assert memory.peak_nbytes(7) == 30
    del kept


# ---- budget ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain",
    [
        CodecChain(Planes(2), Zstd(4096, literals_only=True)),
        CodecChain(Bytes(), Deflate(4096, 1, True)),
        CodecChain(Bytes()),
    ],
)
def test_a_batch_keeps_to_the_budget(chain: CodecChain) -> None:
    blocks = [weights(2, 8192 - 7 * seed, seed=seed) for seed in range(40)]
    budget = 700 << 10
    device = StandInDevice(ReferenceKernels())
    engine = engine_on(device, budget)
    encoded = encode(engine, [tensor(block) for block in blocks], chain)
    assert_nothing_held(engine, device)
    assert device.peak_nbytes == budget
    encodes = sum(name == "encode" for name, _ in device.nvcomp.calls + device.nvcomp.kernel_calls)
    assert chain.coder is None or 1 < encodes < len(blocks) / 3, "several batches, not many"
    jobs = [job(one, chain) for one in encoded]
    engine.decode(jobs, verify="full")
    assert_nothing_held(engine, device)
    assert device.peak_nbytes == budget
    assert all(done.out.numpy().tobytes() == block.tobytes() for done, block in zip(jobs, blocks, strict=True))


def test_the_guess_of_nvcomps_own_memory_is_corrected() -> None:
    class Hungry(NvcompStandIn):
        def allocate(self, nbytes: int) -> list[object]:
            return super().allocate(20 * nbytes)

    device = StandInDevice(ReferenceKernels(), Hungry())
    engine, chain = engine_on(device, 4 << 20), CodecChain(Bytes(), Deflate(4096))
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
