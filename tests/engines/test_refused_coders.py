"""A coder that alone fails the self-test: a warning names it, all CPU threads do its work, engine="cuda" raises."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp.codecs import CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine
from dcp_nvcomp.engines.cuda.health import LITERALS, NVCOMP
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.errors import CodecUnavailableError
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import assert_loads, load, save
from tests.states import assert_same

from .cases import BUDGET, CHAIN, cpu_encode, encode, job, tensor, weights
from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import NvcompWithoutZstd, StandInDevice
from .stand_in_pool import StandInPool, install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BLOCKS = [weights(4, 2500, seed=seed) for seed in range(3)]
STATE = {f"{at:02}": torch.randn(50_000) for at in range(24)} | {f"small.{at}": torch.randn(40) for at in range(9)}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandInPool:
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    made = install_stand_ins(monkeypatch, ReferenceKernels(), self_test=True)
    made.nvcomp = NvcompWithoutZstd
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
        RuntimeWarning, match=r"coded with zstd .*slower CPU engine.*nvCOMP error: unsupported"
    ) as caught:
        save(tmp_path, STATE, codec="planes-zstd", thread_count=4)
    assert sum(issubclass(one.category, RuntimeWarning) for one in caught) == 1
    assert any("dcp-encode" in name for name in cpu_threads)
    assert not any("dcp-cuda" in name for name in cpu_threads)
    assert_loads(tmp_path, STATE, engine="cpu", verify="full")
    # the next one is silent, and other coders run on the GPU as before
    save(tmp_path / "again", STATE, codec="planes-zstd")
    before = len(stand_ins.calls("encode"))
    save(tmp_path / "deflate", STATE, codec="planes-deflate")
    assert len(stand_ins.calls("encode")) > before
    assert_loads(tmp_path / "deflate", STATE, engine="cpu", verify="full")


def test_a_load_leaves_its_blocks_to_all_cpu_threads(
    tmp_path: Path, stand_ins: StandInPool, cpu_threads: set[str]
) -> None:
    save(tmp_path, STATE, codec="planes-zstd", engine="cpu")
    cpu_threads.clear()
    with pytest.warns(RuntimeWarning, match=r"coded with zstd .*slower CPU engine") as caught:
        assert_same(load(tmp_path, STATE), STATE)
    assert sum(issubclass(one.category, RuntimeWarning) for one in caught) == 1
    assert cpu_threads - {"MainThread"} == {"dcp-load"}, "and the self-test's"
    assert stand_ins.devices and stand_ins.devices[0].copies_in == 1, "of the self-test's Deflate alone"


def test_with_engine_cuda_that_is_an_error(tmp_path: Path, stand_ins: StandInPool) -> None:
    with pytest.raises(CheckpointException, match=r"engine='cuda' can't run here: zstd failed its self-test"):
        save(tmp_path / "a", STATE, codec="planes-zstd", engine="cuda")
    save(tmp_path / "b", STATE, codec="planes-zstd", engine="cpu")
    with pytest.raises(CheckpointException, match=r"engine='cuda' can't run here: zstd failed its self-test"):
        load(tmp_path / "b", STATE, engine="cuda")
    save(tmp_path / "c", STATE, codec="planes-deflate", engine="cuda")
    assert_same(load(tmp_path / "c", STATE, engine="cuda"), STATE)


def refusing(policy: EnginePolicy) -> CudaEngine:
    engine = CudaEngine(torch.device("cpu"), policy, backend=StandInDevice(ReferenceKernels()))
    for who in (NVCOMP, LITERALS):
        engine.health.refused[who, Zstd] = "RuntimeError: unsupported"
    return engine


def test_an_engine_warns_once_and_runs_other_coders() -> None:
    engine = refusing(EnginePolicy(BUDGET))
    with pytest.warns(RuntimeWarning, match="coded with zstd .*RuntimeError: unsupported") as caught:
        encoded = encode(engine, [tensor(block) for block in BLOCKS], CHAIN)
    assert len(caught) == 1
    jobs = [job(one, CHAIN) for one in encoded]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.decode(jobs, verify="full")
    assert [done.out.numpy().tobytes() for done in jobs] == [np.asarray(block).tobytes() for block in BLOCKS]


def test_an_engine_that_may_not_fall_back_raises() -> None:
    engine = refusing(EnginePolicy(BUDGET, may_fall_back=False))
    with pytest.raises(CodecUnavailableError, match="zstd failed its self-test"):
        encode(engine, [tensor(BLOCKS[0])], CHAIN)
    with pytest.raises(CodecUnavailableError, match="zstd failed its self-test"):
        engine.decode([job(cpu_encode(BLOCKS[0], CHAIN), CHAIN)], verify="stored")
    encode(engine, [tensor(BLOCKS[0])], CodecChain(Planes(4), Deflate(1024)))
