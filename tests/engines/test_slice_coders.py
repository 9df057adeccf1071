"""nvCOMP's Zstd or our own kernels: who codes what, and that nothing but time depends on it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from dcp_nvcomp import ConfigurationError, NvcompReader, NvcompWriter
from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import BlockRow, EncodedBlock, checksum, padded
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda import slice_coders
from dcp_nvcomp.engines.cuda.coders import DECODE, ENCODE
from dcp_nvcomp.engines.cuda.device import Launch
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.health import LITERALS, NVCOMP
from dcp_nvcomp.engines.cuda.pool import run_self_test
from dcp_nvcomp.engines.cuda.slice_coders import faster_nvcomp
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import load, save
from tests.states import assert_same

from .cases import BUDGET, cpu_encode, encode, job, tensor, weights
from .kernels_on_cpu import ReferenceKernels, emulated_launch
from .nvcomp_stand_in import NvcompStandIn, NvcompWithoutZstd, StandInDevice
from .reference_literals import ReferenceLiterals
from .stand_in_pool import install_stand_ins

KIB = 1 << 10
CPU = torch.device("cpu")
CHAIN = CodecChain(Planes(2), Zstd(4 * KIB, literals_only=True))
BLOCKS = [weights(2, count, seed=count) for count in (3_000, 9_001, 1)]


@pytest.fixture
def launch() -> Launch:
    return ReferenceLiterals()


def decoded(encoded: EncodedBlock, chain: CodecChain) -> bytes:
    """What the CPU engine makes of a block."""
    out = np.empty(encoded.uncompressed_nbytes, np.uint8)
    CpuEngine().decode(encoded.data, encoded.row, chain, out, verify="full")
    return out.tobytes()


def engine_of(launch: Launch | None, zstd: str = "auto", nvcomp: NvcompStandIn | None = None) -> CudaEngine:
    device = StandInDevice(ReferenceKernels(), nvcomp, literals=launch)
    return CudaEngine(CPU, EnginePolicy(BUDGET, zstd=zstd), backend=device)


def nvcomp_calls(engine: CudaEngine) -> list[tuple[str, int]]:
    calls: list[tuple[str, int]] = engine._device.nvcomp.calls
    return calls


def assert_codes(engine: CudaEngine, chain: CodecChain = CHAIN) -> list[EncodedBlock]:
    """The CPU engine reads what the engine encodes, and the engine what the CPU engine encodes."""
    encoded = encode(engine, [tensor(block) for block in BLOCKS], chain)
    assert [decoded(one, chain) for one in encoded] == [block.tobytes() for block in BLOCKS]
    theirs = [job(cpu_encode(block, chain), chain) for block in BLOCKS]
    engine.decode(theirs, verify="stored")
    assert [one.out.numpy().tobytes() for one in theirs] == [block.tobytes() for block in BLOCKS]
    return encoded


def test_nvcomp_by_name(launch: Launch) -> None:
    engine = engine_of(launch, NVCOMP)
    assert_codes(engine)
    assert {name for name, _ in nvcomp_calls(engine)} == {"encode", "decode"}
    assert engine._device.nvcomp.calls and engine.coders._literals is None, "not even compiled"


@pytest.mark.parametrize("zstd", [LITERALS, "auto"])
def test_literals_by_name_and_by_default(launch: Launch, zstd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_coders, "_rates", lambda: {"another GPU": {}})
    engine = engine_of(launch, zstd)
    assert not any(block.was_wrong for block in assert_codes(engine))
    # the CPU engine leaves small slices to libzstd, whose frames can have matches
    assert {name for name, _ in nvcomp_calls(engine)} <= {"decode"}
    nvcomp_calls(engine).clear()
    assert_codes(engine, CodecChain(Planes(2), Deflate(4 * KIB, literals_only=True)))
    assert {name for name, _ in nvcomp_calls(engine)} == {"encode", "decode"}, "the rest is nvCOMP's"


def test_the_real_kernels(literals_library: ctypes.CDLL) -> None:
    engine = engine_of(emulated_launch(literals_library, order=0), LITERALS)
    assert not any(block.was_wrong for block in assert_codes(engine))


def test_literals_where_nvcomp_fails_its_self_test(launch: Launch) -> None:
    engine = engine_of(launch, nvcomp=NvcompWithoutZstd())
    run_self_test(engine, CPU)
    assert engine.health.refused.keys() == {(NVCOMP, Zstd)} and engine.health.unusable is None
    assert (LITERALS, Zstd, ENCODE) in engine.health.tested
    nvcomp_calls(engine).clear()
    assert not any(block.was_wrong for block in assert_codes(engine))
    assert nvcomp_calls(engine) == []
    assert engine.health.wrong_blocks == 0


def test_a_gpu_on_which_nvcomp_was_measured_to_be_faster(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_coders, "faster_nvcomp", lambda gpu: frozenset({"decode"} if gpu == "stand-in" else ()))
    engine = engine_of(launch)
    run_self_test(engine, CPU)
    assert (LITERALS, Zstd, ENCODE) in engine.health.tested, "before they are used"
    nvcomp_calls(engine).clear()
    assert_codes(engine)
    assert {name for name, _ in nvcomp_calls(engine)} == {"decode"}, "nvCOMP decodes, and so checks, what ours encode"


def test_nvcomps_encoder_of_zstd_is_not_used_unasked(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in an illegal instruction on an H200, which takes the GPU from the whole process."""
    monkeypatch.setattr(slice_coders, "_rates", dict)
    with_matches = CodecChain(Bytes(), Zstd(4 * KIB))
    for literals in (launch, None):
        engine = engine_of(literals)
        assert not engine.coders.encodes(with_matches) and engine.coders.decodes(with_matches)
        assert engine.coders.encodes(CHAIN) == (literals is not None)
        assert_codes(engine, with_matches)
        assert {name for name, _ in nvcomp_calls(engine)} <= {"decode"}
    assert engine_of(launch, NVCOMP).coders.encodes(with_matches)


class NvcompOfManyBytes(NvcompStandIn):
    """nvCOMP whose encoder of Zstd takes a lot of memory for any batch, as the real one does."""

    taken_nbytes = 2 * BUDGET

    def called(self, name: str, slices: int) -> None:
        super().called(name, slices)
        if name == "encode":
            self.allocate(self.taken_nbytes)


def test_an_encoder_that_takes_more_than_the_budget(launch: Launch) -> None:
    """What it takes is learnt from the self-test, by all engines of the device; the CPU encodes without a warning."""
    nvcomp = NvcompOfManyBytes()
    engine = engine_of(launch, NVCOMP, nvcomp)
    run_self_test(engine, CPU)
    assert engine.health.unusable is None and not engine.health.refused
    assert (NVCOMP, Zstd, DECODE) in engine.health.tested and (NVCOMP, Zstd, ENCODE) not in engine.health.tested
    assert not engine.coders.encodes(CHAIN) and engine.coders.decodes(CHAIN)
    assert_codes(engine)
    engine.set_policy(EnginePolicy(3 * BUDGET, zstd=NVCOMP))
    assert engine.coders.encodes(CHAIN)
    run_self_test(engine, CPU)
    assert (NVCOMP, Zstd, ENCODE) in engine.health.tested
    before = len(nvcomp_calls(engine))
    assert_codes(engine)
    assert any(name == "encode" for name, _ in nvcomp_calls(engine)[before:])


def test_rates_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {"encode": {"nvcomp": 2.0, "literals": 3.0}, "decode": {"nvcomp": 2.0, "literals": 2.0}}
    measured = {"A": slower, "B": {"encode": {"nvcomp": 4.0, "literals": 3.0}}}
    monkeypatch.setattr("dcp_nvcomp.engines.cuda.slice_coders._rates", lambda: measured)
    assert faster_nvcomp("A") == frozenset() and faster_nvcomp("B") == {"encode"} and faster_nvcomp("C") == frozenset()


def test_the_self_test_leaves_out_what_is_not_used(launch: Launch) -> None:
    engine = engine_of(launch, NVCOMP)
    run_self_test(engine, CPU)
    assert engine.health.tested == {(NVCOMP, coder, way) for coder in (Zstd, Deflate) for way in (ENCODE, DECODE)}
    engine.set_policy(EnginePolicy(BUDGET, zstd=LITERALS))
    before = len(nvcomp_calls(engine))
    run_self_test(engine, CPU)
    assert (LITERALS, Zstd, ENCODE) in engine.health.tested and not engine.health.refused
    assert len(nvcomp_calls(engine)) == before, "nvCOMP was tested before"


def with_matches(block: np.ndarray) -> EncodedBlock:
    """A block of `OTHERS` as other zstd encoders write it."""
    slices = [block[at : at + 4 * KIB].tobytes() for at in range(0, block.size, 4 * KIB)]
    frames = [zstandard.ZstdCompressor(19).compress(data) for data in slices]
    stored = b"".join(frame + bytes(padded(len(frame)) - len(frame)) for frame in frames)
    row = BlockRow(0, tuple(map(len, frames)), checksum(stored), checksum(block))
    return EncodedBlock(memoryview(stored), row, block.size)


OTHERS = CodecChain(Bytes(), CHAIN.coder)
REPEATED = np.tile(np.random.default_rng(3).geometric(0.2, 500).astype(np.uint8), 24)


@pytest.mark.parametrize("nvcomp", [NvcompStandIn, NvcompWithoutZstd])
def test_frames_of_other_encoders(launch: Launch, nvcomp: type[NvcompStandIn]) -> None:
    """Nothing is wrong with them: nvCOMP decodes them, or without it the CPU engine, and nobody is warned."""
    engine = engine_of(launch, "literals", nvcomp())
    run_self_test(engine, CPU)
    nvcomp_calls(engine).clear()
    ours = encode(engine, [tensor(BLOCKS[0])], CHAIN)[0]
    others = with_matches(REPEATED)
    jobs = [job(ours, CHAIN), job(others, OTHERS), job(ours, CHAIN)]
    engine.decode(jobs, verify="stored")
    expected = [BLOCKS[0], REPEATED, BLOCKS[0]]
    assert [one.out.numpy().tobytes() for one in jobs] == [block.tobytes() for block in expected]
    slices = len(others.row.slice_nbytes)
    assert nvcomp_calls(engine) == ([("decode", slices)] if nvcomp is NvcompStandIn else [])
    assert engine.health.wrong_blocks == 0


def spoiling(launch: Launch, kernel: str) -> Launch:
    """Start kernels, but for one of them, which is left out."""

    def spoiled(name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        if name != kernel:
            launch(name, blocks, arguments)

    return spoiled


@pytest.mark.parametrize("kernel", ["measure_slices", "write_slices", "decode_slices"])
def test_kernels_that_do_nothing(launch: Launch, kernel: str) -> None:
    """Found by the check of each batch, and by the self-test, after which nobody is asked to use them again."""
    engine = engine_of(spoiling(launch, kernel), "literals")
    with pytest.warns(RuntimeWarning):
        encoded = encode(engine, [tensor(block) for block in BLOCKS], CHAIN)
    assert [decoded(one, CHAIN) for one in encoded] == [block.tobytes() for block in BLOCKS]
    engine = engine_of(spoiling(launch, kernel), "literals")
    run_self_test(engine, CPU)
    assert engine.health.refused.keys() == {(LITERALS, Zstd)} and engine.health.unusable is None
    assert not engine.coders.encodes(CHAIN), "what was asked for by name is not replaced"
    nvcomp_calls(engine).clear()
    with pytest.warns(RuntimeWarning, match="coded with zstd"):
        assert_codes(engine)
    assert nvcomp_calls(engine) == []
    engine.set_policy(EnginePolicy(BUDGET))
    assert engine.coders.encodes(CHAIN)


def test_kernels_that_do_not_compile() -> None:
    engine = engine_of(None, "literals")
    run_self_test(engine, CPU)
    assert "CodecUnavailableError" in engine.health.refused[LITERALS, Zstd]
    assert not engine.coders.encodes(CHAIN)
    with pytest.warns(RuntimeWarning, match="coded with zstd"):
        assert_codes(engine)
    assert engine_of(None).coders.encodes(CHAIN)


def test_nvcomp_by_name_is_not_replaced(launch: Launch) -> None:
    engine = engine_of(launch, "nvcomp", NvcompWithoutZstd())
    run_self_test(engine, CPU)
    assert not {(LITERALS, Zstd, ENCODE), (LITERALS, Zstd, DECODE)} & engine.health.tested
    with pytest.warns(RuntimeWarning, match="coded with zstd"):
        assert_codes(engine)
    assert not engine.coders.encodes(CHAIN) and engine.coders._literals is None


def test_whole_checkpoints(tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    stand_ins = install_stand_ins(monkeypatch, ReferenceKernels(), self_test=True)
    stand_ins.literals = launch
    state = {"w": torch.randn(300, 100) / 50, "h": torch.randn(30_000).bfloat16(), "z": torch.zeros(5)}
    options = {"cuda_zstd": "literals", "device_memory_budget": 8 << 20}
    save(tmp_path, state, codec="planes-zstd", **options)
    assert (len(stand_ins.calls("encode")), len(stand_ins.calls("decode"))) == (1, 3), "the self-test's alone"
    assert_same(load(tmp_path, state, **options), state)
    assert len(stand_ins.calls("decode")) == 3, "nor does nvCOMP decode anything"
    assert_same(load(tmp_path, state, device_memory_budget=8 << 20), state)
    assert_same(load(tmp_path, state, engine="cpu", verify="full"), state)


def test_a_load_where_nvcomp_fails_its_self_test(launch: Launch) -> None:
    """What a footer says of a coder is not whether its frames are of literals only."""
    engine = engine_of(launch, nvcomp=NvcompWithoutZstd())
    run_self_test(engine, CPU)
    read = CodecChain(Planes(2), Zstd(4 * KIB))
    assert engine.coders.decodes(read) and not engine.coders.encodes(read)
    ours = encode(engine, [tensor(BLOCKS[0])], CHAIN)[0]
    engine._copying = None  # type: ignore[assignment]  # the CPU engine is not asked
    back = job(ours, read)
    engine._decode_served([back], "stored")
    assert back.out.numpy().tobytes() == BLOCKS[0].tobytes()


@pytest.mark.parametrize("kind", [NvcompReader, NvcompWriter])
def test_the_option(tmp_path: Path, kind: Any) -> None:
    save(tmp_path, {"w": torch.ones(1)})
    with pytest.raises(ConfigurationError, match="cuda_zstd='zstd' must be one of 'auto', 'nvcomp', 'literals'"):
        kind(tmp_path, cuda_zstd="zstd")
    assert "cuda_zstd='nvcomp'" in repr(kind(tmp_path, cuda_zstd="nvcomp"))
