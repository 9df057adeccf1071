"""A whole save through the CUDA engine's batches, on the stand-in: what it wrote loads on the CPU engine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, saving, sources
from dcp_nvcomp.engines.cuda import CudaEngine
from dcp_nvcomp.engines.cuda_device import Kernels
from dcp_nvcomp.records import EngineChoice
from dcp_nvcomp.staging import plain_allocate

from .cases import engine_on
from .nvcomp_stand_in import StandInDevice

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def on_the_engine(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> list[CudaEngine]:
    """Host tensors take the way of CUDA tensors, to an engine on the stand-in."""
    made: list[CudaEngine] = []

    def engine(device: torch.device, *, device_memory_budget: int) -> CudaEngine:
        made.append(engine_on(StandInDevice(kernels), device_memory_budget))
        return made[-1]

    monkeypatch.setattr(sources, "CudaEngine", engine)
    monkeypatch.setattr(EngineChoice, "on_cuda", lambda self, device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(saving, "pinned_allocate", plain_allocate)
    return made


@pytest.mark.parametrize("codec", ["auto", "planes-zstd", "planes-deflate", "zstd", "none"])
def test_save_through_the_engine(tmp_path: Path, on_the_engine: list[CudaEngine], codec: str) -> None:
    generator = torch.Generator().manual_seed(3)
    state: dict[str, Any] = {
        "w": torch.randn(300, 999, generator=generator),
        "h": torch.randn(100_001, generator=generator).bfloat16(),
        "v": torch.rand(200, 500, generator=generator).t(),
        "i": torch.arange(40_000),
        "z": torch.zeros(50_000, dtype=torch.complex64),
        "small": torch.ones(5),
        "object": {"a": 1},
    }
    dcp.save(state, storage_writer=NvcompWriter(tmp_path, codec=codec), no_dist=True)
    assert len(on_the_engine) == 1, "one engine, on the thread of its own"
    into = {k: torch.full_like(v, 7) if isinstance(v, torch.Tensor) else {"a": 0} for k, v in state.items()}
    dcp.load(into, storage_reader=NvcompReader(tmp_path, engine="cpu", verify="full"), no_dist=True)
    for key, value in state.items():
        assert torch.equal(into[key], value) if isinstance(value, torch.Tensor) else into[key] == value
