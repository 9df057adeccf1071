"""What needs a CUDA device: tensors on it, the CUDA engine against the CPU engine both ways, ANS, and FSDP2 jobs."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from dcp_nvcomp import errors
from tests.conformance.plugins import OURS, cause_of, quiet_stock
from tests.conformance.values import VALUES, trained
from tests.states import assert_same_bits, opposite_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *quiet_stock,
]

REPOSITORY = Path(__file__).parents[3]
CODECS = ["auto", "planes-zstd", "planes-deflate", "zstd", "none", "ans"]


def _on_gpu(value: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of the same storage: `cuda()` alone would make strided tensors dense."""
    plain = value.detach()
    moved = torch.empty(0, dtype=value.dtype, device="cuda").set_(
        plain.untyped_storage().cuda(), plain.storage_offset(), plain.size(), plain.stride()
    )
    moved = moved.conj() if plain.is_conj() else moved
    return torch._neg_view(moved) if plain.is_neg() else moved


def _values(device: str) -> dict[str, torch.Tensor]:
    values = {name: make() for name, make in VALUES.items() if name != "unaligned"}
    return {name: _on_gpu(value) for name, value in values.items()} if device == "cuda" else values


@functools.cache
def _expected() -> dict[str, torch.Tensor]:
    return _values("cpu")


def _assert_loads(path: Path, device: str, engine: str) -> None:
    state = {name: opposite_of(value).to(device) for name, value in _expected().items()}
    dcp.load(state, storage_reader=OURS.reader(path, engine=engine))
    for name, value in _expected().items():
        assert state[name].device.type == device
        assert_same_bits(state[name], value, name)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_written_and_read_on_the_gpu(tmp_path: Path, codec: str, engine: str) -> None:
    dcp.save(_values("cuda"), storage_writer=OURS.writer(tmp_path, codec=codec, engine=engine))
    _assert_loads(tmp_path, "cuda", engine)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "ans"])
@pytest.mark.parametrize("loading_device", ["cuda", "cpu"])
@pytest.mark.parametrize("saving_device", ["cuda", "cpu"])
@pytest.mark.parametrize(("writes", "reads"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_what_one_engine_wrote_the_other_reads(
    tmp_path: Path, writes: str, reads: str, saving_device: str, loading_device: str, codec: str
) -> None:
    dcp.save(_values(saving_device), storage_writer=OURS.writer(tmp_path, codec=codec, engine=writes))
    _assert_loads(tmp_path, loading_device, reads)


def test_both_engines_in_one_state(tmp_path: Path) -> None:
    gpu, cpu = _values("cuda"), _values("cpu")
    dcp.save({"gpu": gpu, "cpu": cpu}, storage_writer=OURS.writer(tmp_path))
    state = {
        "gpu": {name: opposite_of(value) for name, value in cpu.items()},
        "cpu": {name: opposite_of(value).cuda() for name, value in cpu.items()},
    }
    dcp.load(state, storage_reader=OURS.reader(tmp_path))
    for place in ("gpu", "cpu"):
        for name, value in cpu.items():
            assert_same_bits(state[place][name], value, f"{place}.{name}")


def test_ans_is_read_on_a_gpu_only(tmp_path: Path) -> None:
    value = trained(torch.bfloat16, (2000, 1500))
    writer = OURS.writer(tmp_path, codec="ans")
    dcp.save({"w": value.cuda()}, storage_writer=writer)
    assert "ans" in str(writer.last_save.by_codec) and writer.last_save.ratio > 1.3
    state = {"w": opposite_of(value)}
    dcp.load(state, storage_reader=OURS.reader(tmp_path))
    assert_same_bits(state["w"], value)
    with pytest.raises(dcp.CheckpointException, match="(?i)ans") as caught:
        dcp.load(state, storage_reader=OURS.reader(tmp_path, engine="cpu"))
    assert isinstance(cause_of(caught.value), errors.CodecUnavailableError)


def test_device_memory_stays_in_its_budget(tmp_path: Path) -> None:
    budget = 64 << 20
    value = torch.randn(8192, 16384, device="cuda").bfloat16()
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    dcp.save({"w": value}, storage_writer=OURS.writer(tmp_path, engine="cuda", device_memory_budget=budget))
    peak = torch.cuda.max_memory_allocated() - allocated
    outside = free_before - torch.cuda.mem_get_info()[0]
    assert peak <= budget * 1.1, f"{peak >> 20} MiB of torch's memory"
    # Kernels and library handles take a fixed amount outside of torch's allocator.
    assert outside <= budget + (512 << 20), f"{outside >> 20} MiB of the device"


@pytest.mark.parametrize("stager_name", ["none-given", "blocking", "default", "pinned-in-background"])
def test_async_save_of_cuda_tensors(tmp_path: Path, stager_name: str) -> None:
    stager = {
        "none-given": lambda: None,
        "blocking": BlockingAsyncStager,
        "default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
        "pinned-in-background": lambda: DefaultStager(StagingOptions(True, False, True, True)),
    }[stager_name]()
    value = trained(torch.float32, (1000, 1500))
    live = value.cuda()
    response = dcp.async_save({"w": live}, storage_writer=OURS.writer(tmp_path), async_stager=stager)
    if hasattr(response, "staging_completion"):
        response.staging_completion.result(timeout=60)
        response = response.upload_completion
    live.fill_(-1)
    response.result(timeout=60)
    state = {"w": torch.zeros_like(live)}
    dcp.load(state, storage_reader=OURS.reader(tmp_path))
    assert_same_bits(state["w"], value)
    if stager is not None:
        stager.close()


def _torchrun(rank_count: int, action: str, directory: Path, *more: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(rank_count)]
    command += ["-m", "tests.distributed.gpu.fsdp2_job", action, str(directory), *more]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr[-6000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("writes", "reads"), [("auto", "auto"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_fsdp2_saved_on_n_ranks_and_loaded_on_m(tmp_path: Path, writes: str, reads: str) -> None:
    saving_ranks = max(2, torch.cuda.device_count())
    _torchrun(saving_ranks, "save", tmp_path, "--engine", writes)
    for loading_ranks in sorted({1, saving_ranks // 2, saving_ranks}):
        _torchrun(loading_ranks, "load", tmp_path, "--engine", reads)


@pytest.mark.timeout(600)
def test_fsdp2_with_ans(tmp_path: Path) -> None:
    _torchrun(2, "save", tmp_path, "--codec", "ans")
    _torchrun(1, "load", tmp_path)
