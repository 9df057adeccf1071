"""`dcp-nvcomp convert`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcp_nvcomp import save
from dcp_nvcomp.cli.common import parse_nbytes
from tests.cli.checkpoints import run

STATE = {"model": {"w": torch.arange(10.0)}, "step": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(STATE, tmp_path / "a", no_dist=True)
    return tmp_path


convert = partial(run, "convert")


def test_to_safetensors(saved: Path) -> None:
    to = saved / "b.safetensors"
    status, output, errors = convert(saved / "a", to, "--prefix", "model.", "--dtype", "bfloat16")
    assert (status, errors) == (0, "")
    assert output == f"{saved}/a -> {to} (safetensors): 1 tensors, 20 bytes\n"
    assert load_file(to)["w"].dtype == torch.bfloat16


def test_mistakes(saved: Path) -> None:
    status, output, errors = convert(saved / "a", saved / "b.safetensors")
    assert (status, output) == (1, "")
    assert len(errors.splitlines()) == 1 and "prefix" in errors
    assert convert(saved / "a", saved / "b", "--dtype", "int8")[0] == 2
    assert convert(saved / "a", saved / "b", "--to", "onnx")[0] == 2
    assert convert(saved / "a", saved / "b", "--max-shard", "5 apples")[0] == 2
    assert convert(saved / "nothing", saved / "b")[0] == 1


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("100", 100)])
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_nbytes(text, "--max-shard") == nbytes
