"""`dcp-nvcomp diff` and `compare_checkpoints`: what differs between two checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dcp_nvcomp import compare_checkpoints, save
from dcp_nvcomp.cli.app import app
from tests.checkpoints import save_stock


class Opaque:
    """Not read, as it could run code."""


def state() -> dict[str, Any]:
    return {
        "same": torch.randn(50, 40, generator=torch.Generator().manual_seed(0)),
        "w": torch.tensor([1.0, 2.0, float("nan"), 0.0]),
        "shape": torch.zeros(3),
        "dtype": torch.zeros(3),
        "kind": torch.zeros(3),
        "step": 3,
        "gone": torch.zeros(2),
        "opaque": Opaque(),
    }


def other() -> dict[str, Any]:
    changed = state()
    changed["w"] = torch.tensor([1.0, 2.5, float("nan"), -0.0])
    changed.update(shape=torch.zeros(4), dtype=torch.zeros(3).half(), kind=3, step=4, new=torch.zeros(1))
    del changed["gone"]
    return changed


def diff(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diff", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    save(state(), tmp_path / "a", no_dist=True)
    save_stock(tmp_path / "b", other())
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_every_difference(paths: tuple[str, str]) -> None:
    found = compare_checkpoints(*paths)
    assert {one.fqn: one.kind for one in found.differences} == {
        "w": "values",
        "shape": "shape",
        "dtype": "dtype",
        "kind": "kind",
        "step": "values",
        "gone": "only in a",
        "new": "only in b",
        "opaque": "unknown",
    }
    (w,) = (one for one in found.differences if one.fqn == "w")
    assert (w.elements, w.max_difference) == (2, 0.5)
    assert found.equal == 1 and not found.is_equal


def test_equal_ones(paths: tuple[str, str], tmp_path: Path) -> None:
    plain = {key: value for key, value in state().items() if key != "opaque"}
    save(plain, tmp_path / "c", no_dist=True)
    save_stock(tmp_path / "d", plain)
    status, output, errors = diff(str(tmp_path / "c"), str(tmp_path / "d"))
    assert (status, output, errors) == (0, "7 keys are equal in their values.\n", "")


def test_nan_that_came_or_went(tmp_path: Path) -> None:
    save({"w": torch.zeros(2)}, tmp_path / "a", no_dist=True)
    save({"w": torch.tensor([0.0, float("nan")])}, tmp_path / "b", no_dist=True)
    (one,) = compare_checkpoints(tmp_path / "a", tmp_path / "b").differences
    assert one.max_difference is not None and math.isnan(one.max_difference)
    found = json.loads(diff(str(tmp_path / "a"), str(tmp_path / "b"), "--json")[1])
    assert found["differences"][0]["max_difference"] == "nan"


def test_the_table_and_keys_only(paths: tuple[str, str]) -> None:
    status, output, _ = diff(*paths)
    assert status == 1
    assert output.splitlines()[0].split() == ["key", "differs", "how"]
    assert "2 of 4 elements differ, by at most 0.5" in output
    assert output.splitlines()[-1] == "1 keys are equal in their values, 8 differ."
    status, output, _ = diff(*paths, "--keys-only")
    assert "elements differ" not in output and "float32 [3] and float16 [3]" in output


def test_progress(paths: tuple[str, str]) -> None:
    calls: list[tuple[int, int]] = []
    compare_checkpoints(*paths, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0


def test_mistakes(paths: tuple[str, str]) -> None:
    status, _, errors = diff(paths[0], paths[1] + "/nothing")
    assert status == 1 and len(errors.splitlines()) == 1
