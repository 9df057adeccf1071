"""Our kernels for Zstd, nvCOMP for all else: what codes what, and that nothing but time depends on it."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import U8, BlockRow, Coder, EncodedBlock, checksum, padded
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda import slice_coders
from dcp_nvcomp.engines.cuda.batches import I64
from dcp_nvcomp.engines.cuda.device import Launch
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine
from dcp_nvcomp.engines.cuda.health import LITERALS
from dcp_nvcomp.engines.cuda.pool import run_self_test
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.errors import CodecUnavailableError
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import assert_loads, load, save
from tests.states import assert_same

from .cases import BUDGET, CHAIN, OWN, cpu_encode, decoded, encode, job, tensor, weights
from .kernels_on_cpu import ReferenceKernels, emulated_launch
from .nvcomp_stand_in import NvcompStandIn, NvcompWithout, StandInDevice
from .reference_literals import ReferenceLiterals
from .stand_in_pool import StandInPool, install_stand_ins

KIB = 1 << 10
CPU = torch.device("cpu")
LITERALS_ONLY = CodecChain(Planes(2), Zstd(4 * KIB, literals_only=True))
FLOATS = [weights(4, 2500, seed=seed) for seed in range(3)]
BLOCKS = [weights(2, count, seed=count) for count in (3_000, 9_001, 1)]


def engine_of(launch: Launch | None = None, nvcomp: NvcompStandIn | None = None) -> CudaEngine:
    return CudaEngine(CPU, EnginePolicy(BUDGET), backend=StandInDevice(ReferenceKernels(), nvcomp, literals=launch))


class WithoutLiterals(StandInDevice):
    def compile(self, sources: Sequence[str], options: Sequence[str], names: Sequence[str]) -> Launch:
        raise CodecUnavailableError("The kernels do not compile here.")


def nvcomp_calls(engine: CudaEngine) -> list[tuple[str, int]]:
    calls: list[tuple[str, int]] = engine._device.nvcomp.calls
    return calls


def assert_codes(engine: CudaEngine, chain: CodecChain = LITERALS_ONLY) -> list[EncodedBlock]:
    """The CPU engine reads what the engine encodes, and the engine what the CPU engine encodes."""
    encoded = encode(engine, [tensor(block) for block in BLOCKS], chain)
    assert [decoded(one, chain) for one in encoded] == [block.tobytes() for block in BLOCKS]
    theirs = [job(cpu_encode(block, chain), chain) for block in BLOCKS]
    engine.decode(theirs, verify="stored")
    assert [one.out.numpy().tobytes() for one in theirs] == [block.tobytes() for block in BLOCKS]
    return encoded


@pytest.mark.parametrize("compiled", [False, True], ids=["reference", "compiled"])
def test_literals_are_coded_by_our_kernels(request: pytest.FixtureRequest, compiled: bool) -> None:
    library: ctypes.CDLL | None = request.getfixturevalue("literals_library") if compiled else None
    engine = engine_of(None if library is None else emulated_launch(library, order=0))
    run_self_test(engine, CPU)
    assert not engine.health.refused and engine.health.unusable is None
    nvcomp_calls(engine).clear()
    assert not any(block.was_wrong for block in assert_codes(engine))
    # the CPU engine leaves small slices to libzstd, whose frames can have matches
    assert {name for name, _ in nvcomp_calls(engine)} <= {"decode"}


def test_deflate_is_coded_by_nvcomp() -> None:
    engine = engine_of()
    assert_codes(engine, CodecChain(Planes(2), Deflate(4 * KIB, literals_only=True)))
    assert {name for name, _ in nvcomp_calls(engine)} == {"encode", "decode"}
    assert engine.coders._literals is None, "not even compiled"


def test_zstd_with_matches_is_encoded_by_the_cpu_without_a_warning() -> None:
    with_matches = CodecChain(Bytes(), Zstd(4 * KIB))
    engine = engine_of()
    assert not engine.coders.encodes(with_matches) and engine.coders.decodes(with_matches)
    assert_codes(engine, with_matches)


OTHERS = CodecChain(Bytes(), LITERALS_ONLY.coder)
REPEATED = np.tile(np.random.default_rng(3).geometric(0.2, 500).astype(np.uint8), 24)


def with_matches(block: np.ndarray) -> EncodedBlock:
    """A block of `OTHERS` as other zstd encoders write it."""
    slices = [block[at : at + 4 * KIB].tobytes() for at in range(0, block.size, 4 * KIB)]
    frames = [zstandard.ZstdCompressor(19).compress(data) for data in slices]
    stored = b"".join(frame + bytes(padded(len(frame)) - len(frame)) for frame in frames)
    row = BlockRow(0, tuple(map(len, frames)), checksum(stored), checksum(block))
    return EncodedBlock(memoryview(stored), row, block.size)


@pytest.mark.parametrize("without", ["", "Zstd"])
def test_frames_of_other_encoders(without: str) -> None:
    """Nothing is wrong with them: nvCOMP decodes them, or without it the CPU engine, and there is no warning."""
    engine = engine_of(nvcomp=NvcompWithout(without))
    run_self_test(engine, CPU)
    assert engine.health.refused.keys() == ({Zstd.name} if without else set()) and engine.health.unusable is None
    nvcomp_calls(engine).clear()
    ours = encode(engine, [tensor(BLOCKS[0])], LITERALS_ONLY)[0]
    others = with_matches(REPEATED)
    jobs = [job(ours, LITERALS_ONLY), job(others, OTHERS), job(ours, LITERALS_ONLY)]
    engine.decode(jobs, verify="stored")
    expected = [BLOCKS[0], REPEATED, BLOCKS[0]]
    assert [one.out.numpy().tobytes() for one in jobs] == [block.tobytes() for block in expected]
    assert nvcomp_calls(engine) == ([] if without else [("decode", len(others.row.slice_nbytes))])
    assert engine.health.wrong_blocks == 0


def test_only_frames_that_have_to_be_looked_at_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU engine leaves the short last slice of a tensor to libzstd; the rest of a batch is our kernels'."""
    looked_at: list[int] = []
    faults = slice_coders.frame_faults

    def watched(coder: Coder, memory: U8, *frames: I64) -> dict[int, str]:
        looked_at.append(memory.size)
        return faults(coder, memory, *frames)

    monkeypatch.setattr(slice_coders, "frame_faults", watched)
    engine = engine_of()
    long, short = weights(2, 100_000), weights(2, 4 * KIB + 200)
    jobs = [job(cpu_encode(block, LITERALS_ONLY), LITERALS_ONLY) for block in (short, long, short)]
    engine.decode(jobs, verify="stored")
    expected = [short, long, short]
    assert [one.out.numpy().tobytes() for one in jobs] == [block.tobytes() for block in expected]
    assert nvcomp_calls(engine) and engine.health.wrong_blocks == 0
    assert looked_at and sum(looked_at) < 2 * short.nbytes


def spoiling(kernel: str) -> Launch:
    """Start kernels, but for one of them, which is left out."""
    launch = ReferenceLiterals()

    def spoiled(name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        if name != kernel:
            launch(name, blocks, arguments)

    return spoiled


@pytest.mark.parametrize("kernel", ["measure_slices", "write_slices", "decode_slices"])
def test_kernels_that_do_nothing(kernel: str) -> None:
    """Found by the check of each batch, and by the self-test, after which they are not used again."""
    with pytest.warns(RuntimeWarning):
        assert_codes(engine_of(spoiling(kernel)))
    assert_left_out(engine_of(spoiling(kernel)))


def test_kernels_that_do_not_compile() -> None:
    engine = CudaEngine(CPU, EnginePolicy(BUDGET), backend=WithoutLiterals(ReferenceKernels()))
    assert_left_out(engine)
    assert "CodecUnavailableError" in engine.health.refused[LITERALS]


def assert_left_out(engine: CudaEngine) -> None:
    """The CPU encodes in the place of our kernels, and nvCOMP decodes."""
    run_self_test(engine, CPU)
    assert engine.health.refused.keys() == {LITERALS} and engine.health.unusable is None
    assert not engine.coders.encodes(LITERALS_ONLY) and engine.coders.decodes(LITERALS_ONLY)
    nvcomp_calls(engine).clear()
    with pytest.warns(RuntimeWarning, match="coded with zstd"):
        assert_codes(engine)
    assert {name for name, _ in nvcomp_calls(engine)} == {"decode"}


def test_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    stand_ins = install_stand_ins(monkeypatch, ReferenceKernels(), self_test=True)
    state = {"w": torch.randn(300, 100) / 50, "h": torch.randn(30_000).bfloat16(), "z": torch.zeros(5)}
    save(tmp_path, state, codec="planes-zstd", device_memory_budget=8 << 20)
    calls = [name for device in stand_ins.devices for name, _ in device.nvcomp.calls]
    assert sorted(calls) == ["decode"] * 3 + ["encode"], "the self-test's alone"
    assert_same(load(tmp_path, state, device_memory_budget=8 << 20), state)
    assert len([name for device in stand_ins.devices for name, _ in device.nvcomp.calls]) == 4
    assert_same(load(tmp_path, state, engine="cpu", verify="full"), state)


# ---- a coder that alone fails the self-test --------------------------------------------------------------------------


STATE = {f"{at:02}": torch.randn(50_000) for at in range(24)} | {f"small.{at}": torch.randn(40) for at in range(9)}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandInPool:
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    made = install_stand_ins(monkeypatch, ReferenceKernels(), self_test=True)
    made.nvcomp = NvcompWithout
    return made


@pytest.fixture
def cpu_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that code blocks on the CPU; none may be that of an engine of the GPU."""
    seen: set[str] = set()
    cpu_work, decode = CpuEngine.encode_beside, CpuEngine.decode

    def watched_encode(self: CpuEngine, *given: Any) -> tuple[list[EncodedBlock], int]:
        seen.add(threading.current_thread().name)
        return cpu_work(self, *given)

    def watched_decode(self: CpuEngine, *given: Any, **more: Any) -> None:
        seen.add(threading.current_thread().name)
        decode(self, *given, **more)

    def copying(*given: Any, **more: Any) -> Any:
        raise AssertionError("through an engine of the GPU")

    monkeypatch.setattr(CpuEngine, "encode_beside", watched_encode)
    monkeypatch.setattr(CpuEngine, "decode", watched_decode)
    monkeypatch.setattr(CopyingEngine, "encode_block", copying)
    monkeypatch.setattr(CopyingEngine, "decoded", copying)
    return seen


def test_a_save_leaves_its_blocks_to_all_cpu_threads(
    tmp_path: Path, stand_ins: StandInPool, cpu_threads: set[str]
) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"coded with deflate .*slower CPU engine.*nvCOMP error: unsupported"
    ) as caught:
        save(tmp_path, STATE, codec="planes-deflate", thread_count=4)
    assert sum(issubclass(one.category, RuntimeWarning) for one in caught) == 1
    assert any("dcp-encode" in name for name in cpu_threads)
    assert not any("dcp-cuda" in name for name in cpu_threads)
    assert_loads(tmp_path, STATE, engine="cpu", verify="full")
    # the next one is silent, and other coders run on the GPU as before
    save(tmp_path / "again", STATE, codec="planes-deflate")
    before = len(stand_ins.calls("encode"))
    save(tmp_path / "zstd", STATE, codec="planes-zstd")
    assert len(stand_ins.calls("encode")) > before
    assert_loads(tmp_path / "zstd", STATE, engine="cpu", verify="full")


def test_a_load_leaves_its_blocks_to_all_cpu_threads(
    tmp_path: Path, stand_ins: StandInPool, cpu_threads: set[str]
) -> None:
    save(tmp_path, STATE, codec="planes-deflate", engine="cpu")
    cpu_threads.clear()
    with pytest.warns(RuntimeWarning, match=r"coded with deflate .*slower CPU engine") as caught:
        assert_same(load(tmp_path, STATE), STATE)
    assert sum(issubclass(one.category, RuntimeWarning) for one in caught) == 1
    assert cpu_threads - {"MainThread"} == {"dcp-load"}, "and the self-test's"
    assert stand_ins.devices and stand_ins.devices[0].copies_in == 2, "of the self-test's Zstd alone"


def test_with_engine_cuda_that_is_an_error(tmp_path: Path, stand_ins: StandInPool) -> None:
    with pytest.raises(CheckpointException, match=r"engine='cuda' can't run here: deflate failed its self-test"):
        save(tmp_path / "a", STATE, codec="planes-deflate", engine="cuda")
    save(tmp_path / "b", STATE, codec="planes-deflate", engine="cpu")
    with pytest.raises(CheckpointException, match=r"engine='cuda' can't run here: deflate failed its self-test"):
        load(tmp_path / "b", STATE, engine="cuda")
    save(tmp_path / "c", STATE, codec="planes-zstd", engine="cuda")
    assert_same(load(tmp_path / "c", STATE, engine="cuda"), STATE)


def refusing(policy: EnginePolicy) -> CudaEngine:
    engine = CudaEngine(torch.device("cpu"), policy, backend=StandInDevice(ReferenceKernels()))
    engine.health.refused[Deflate.name] = "RuntimeError: unsupported"
    return engine


def test_an_engine_warns_once_and_runs_other_coders() -> None:
    engine = refusing(EnginePolicy(BUDGET))
    with pytest.warns(RuntimeWarning, match="coded with deflate .*RuntimeError: unsupported") as caught:
        encoded = encode(engine, [tensor(block) for block in FLOATS], CHAIN)
    assert len(caught) == 1
    jobs = [job(one, CHAIN) for one in encoded]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.decode(jobs, verify="full")
    assert [done.out.numpy().tobytes() for done in jobs] == [np.asarray(block).tobytes() for block in FLOATS]


def test_an_engine_that_may_not_fall_back_raises() -> None:
    engine = refusing(EnginePolicy(BUDGET, may_fall_back=False))
    with pytest.raises(CodecUnavailableError, match="deflate failed its self-test"):
        encode(engine, [tensor(FLOATS[0])], CHAIN)
    with pytest.raises(CodecUnavailableError, match="deflate failed its self-test"):
        engine.decode([job(cpu_encode(FLOATS[0], CHAIN), CHAIN)], verify="stored")
    encode(engine, [tensor(FLOATS[0])], OWN)
