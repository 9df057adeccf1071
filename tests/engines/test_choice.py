"""engine="cuda" is never ignored: where CUDA can't run, saves and loads fail before they do anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompReader
from dcp_nvcomp.engines import choice
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.errors import CodecUnavailableError
from tests.checkpoints import assert_loads, save

STATE = {"w": torch.arange(9.0)}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

REASON = cuda_unavailable_reason()
without_cuda = pytest.mark.skipif(REASON is None, reason="CUDA can run here")


def refusal(caught: pytest.ExceptionInfo[CheckpointException]) -> str:
    error = caught.value.failures[0][0]
    assert isinstance(error, CodecUnavailableError)
    return str(error)


@without_cuda
def test_a_save_is_refused_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "run", STATE, engine="cuda")
    assert "engine='cuda' can't run here" in refusal(caught) and str(REASON) in refusal(caught)
    assert not (tmp_path / "run").exists()


@without_cuda
def test_a_load_is_refused_before_it_reads(tmp_path: Path) -> None:
    save(tmp_path, STATE)
    into = {"w": torch.full((9,), 7.0)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(into, storage_reader=NvcompReader(tmp_path, engine="cuda"), no_dist=True)
    assert "engine='cuda' can't run here" in refusal(caught) and str(REASON) in refusal(caught)
    assert bool((into["w"] == 7).all())


@without_cuda
def test_metadata_can_be_read_all_the_same(tmp_path: Path) -> None:
    save(tmp_path, STATE)
    assert list(NvcompReader(tmp_path, engine="cuda").read_metadata().state_dict_metadata) == ["w"]


def test_tensors_in_host_memory_are_handled_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA can run, engine="cuda" is about GPU tensors: a state has others too, such as step counters."""
    monkeypatch.setattr(choice, "cuda_unavailable_reason", lambda: None)
    save(tmp_path, STATE, engine="cuda")
    assert_loads(tmp_path, STATE, engine="cuda")


@without_cuda
@pytest.mark.parametrize("engine", ["auto", "cpu"])
def test_others_say_nothing(tmp_path: Path, engine: str) -> None:
    save(tmp_path, STATE, engine=engine)
    assert_loads(tmp_path, STATE, engine=engine)
