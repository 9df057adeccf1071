"""async_save of tensors that a GPU encodes, on the stand-in: only what they are encoded to gets to host memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.staging import staged_by
from dcp_nvcomp import SaveStats, async_save
from dcp_nvcomp.engines.cuda.device import Kernels
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.saving import process_state as keeping
from dcp_nvcomp.saving.asynchronous import segments
from dcp_nvcomp.saving.process_state import process_state
from tests.checkpoints import assert_loads
from tests.states import State

from .stand_in_pool import StandInPool, install_stand_ins

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("on_its_own"),
]


@pytest.fixture
def on_its_own() -> Iterator[None]:
    """And encoded: the stand-in's tensors are in host memory."""
    keeping.forget_all()
    with staged_by("encode"):
        yield
    keeping.forget_all()


@pytest.fixture
def on_the_engine(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> StandInPool:
    monkeypatch.setattr(segments, "pinned_allocate", plain_allocate)
    return install_stand_ins(monkeypatch, kernels)


def trained(count: int = 16, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(700 + number, 300, generator=generator) * 0.02 for number in range(count)}


@pytest.mark.ci
@pytest.mark.parametrize("budget", [None, 1])
def test_only_encoded_bytes_are_staged(tmp_path: Path, on_the_engine: StandInPool, budget: int | None) -> None:
    for seed in range(2):
        state = trained(seed=seed)
        saving = async_save(state, tmp_path, no_dist=True, staging_budget_nbytes=budget)
        saving.staging_completion.result(100)
        for value in state.values():
            value.zero_()
        stats = SaveStats.of(saving.upload_completion.result(100))
        assert stats is not None
        encoded_nbytes = sum(totals.encoded_nbytes for totals in stats.by_codec.values())
        assert stats.staged_nbytes == encoded_nbytes < sum(value.nbytes for value in state.values())
        assert on_the_engine.calls("encode"), "the CPU did it"
        assert process_state().stores.pinned.nbytes >= min(encoded_nbytes, budget or encoded_nbytes)
        assert process_state().stores.plain.nbytes == 0
        assert_loads(tmp_path, trained(seed=seed), engine="cpu", verify="full")


def test_segments_of_a_large_save_serve_the_next(tmp_path: Path, on_the_engine: StandInPool) -> None:
    nbytes = []
    for seed in range(2):
        async_save(trained(seed=seed), tmp_path / str(seed), no_dist=True).upload_completion.result(100)
        nbytes.append(process_state().stores.pinned.nbytes)
    assert nbytes == nbytes[:1] * 2


@pytest.mark.ci
def test_tensors_of_both_engines(tmp_path: Path, on_the_engine: StandInPool) -> None:
    """What is small, or no float, or of a codec that the GPU lacks, is encoded on the CPU."""
    state = {**trained(), "object": [1, 2], "step": torch.tensor(3), **{f"s{n}": torch.randn(5) for n in range(50)}}
    async_save(state, tmp_path, no_dist=True).upload_completion.result(100)
    assert_loads(tmp_path, state, engine="cpu", verify="full")


def test_without_page_locked_memory(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(nbytes: int) -> memoryview:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(segments, "pinned_allocate", none)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async_save(trained(), tmp_path, no_dist=True).upload_completion.result(100)
    assert len([one for one in caught if "page-locked memory" in str(one.message)]) == 1
    assert on_the_engine.calls("encode"), "on the GPU all the same"
    assert_loads(tmp_path, trained(), engine="cpu", verify="full")
