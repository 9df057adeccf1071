"""Stock DCP's tools on a checkpoint of this package: their message, and the way out in docs/troubleshooting.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.cli.app import app
from tests.states import assert_same

MESSAGE = "'tuple' object has no attribute 'relative_path'"
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "step": 7,
    }


def load_by_id(path: Path) -> None:
    dcp.load(state(), checkpoint_id=path, no_dist=True)


def load_by_stock_reader(path: Path) -> None:
    dcp.load(state(), storage_reader=dcp.FileSystemReader(path), no_dist=True)


def convert(path: Path) -> None:
    dcp_to_torch_save(path, path.with_suffix(".pt"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    dcp.save(state(), storage_writer=NvcompWriter(path), no_dist=True)
    return path


@pytest.mark.parametrize("use", [load_by_id, load_by_stock_reader, convert])
def test_the_message_is_the_one_that_the_page_explains(checkpoint: Path, use: Callable[[Path], None]) -> None:
    with pytest.raises(CheckpointException) as caught:
        use(checkpoint)
    (cause, _), *_ = caught.value.failures.values()
    assert type(cause) is AttributeError and str(cause) == MESSAGE
    assert f"## `{MESSAGE}`\n" in PAGE.read_text()


def test_the_way_out_works(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text().split(f"## `{MESSAGE}`\n")[1].split("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^dcp-nvcomp (convert .*)$", section, re.MULTILINE)
    for command in commands:
        arguments = command.replace("s3://bucket/run/step-1000", str(checkpoint)).split()
        assert CliRunner().invoke(app, arguments).exit_code == 0
    dcp_to_torch_save("stock", "again.pt")
    for name in ("checkpoint.pt", "again.pt"):
        assert_same(torch.load(name, weights_only=True), state())
    assert len(commands) == 2
