"""Tables fit the terminal: columns are left out, keys stay whole."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dcp_nvcomp import save
from dcp_nvcomp.calls.tables import Column, Table, left, local_time
from tests.cli.checkpoints import run

COLUMNS = (left("key"), left("dtype", drop=2), Column("size", drop=1), Column("ratio"))


def lines(width: int, *keys: str) -> tuple[list[str], list[str]]:
    return Table(COLUMNS, [(key, "bfloat16", "12.3 MB", "1.500") for key in keys]).lines(width)


def test_all_columns_where_there_is_room() -> None:
    found, left_out = lines(80, "model.w", "b")
    assert found == [
        "key      dtype        size  ratio",
        "model.w  bfloat16  12.3 MB  1.500",
        "b        bfloat16  12.3 MB  1.500",
    ]
    assert left_out == []


def test_the_least_important_ones_are_left_out_first() -> None:
    assert lines(32, "model.w")[1] == ["dtype"]
    assert lines(20, "model.w")[1] == ["dtype", "size"]
    found, left_out = lines(10, "model.layers.0.weight")
    assert found[1] == "model.layers.0.weight  1.500", "keys are never folded or cut"
    assert left_out == ["dtype", "size"]


@given(st.lists(st.text("aé漢.", min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 100))
def test_lines_fit_unless_what_stays_does_not(keys: list[str], width: int) -> None:
    found, left_out = lines(width, *keys)
    longest = max(map(cell_len, found))
    assert longest <= width or left_out == ["dtype", "size"]
    for key, line in zip(keys, found[1:], strict=True):
        assert line.startswith(key)


@pytest.mark.parametrize("seconds", [1e14, -1e14, 1e18, -1e18, 1e300, math.nan, math.inf, -math.inf])
def test_times_that_no_calendar_has(seconds: float) -> None:
    assert local_time(seconds) == f"{seconds:.3g} s"


def _runs(*arguments: str) -> str:
    status, output, errors = run(*arguments)
    assert status == 0, errors
    return output


@pytest.mark.parametrize("seconds", [10**14, -(10**10), 10**15])
def test_lists_show_files_of_such_times(tmp_path: Path, seconds: int) -> None:
    save({"w": torch.ones(3)}, tmp_path / "run" / "step-1", no_dist=True)
    for file in (tmp_path / "run" / "step-1").iterdir():
        try:
            os.utime(file, ns=(0, seconds * 10**9))
        except OverflowError:  # more than the system call takes
            os.utime(file, times=(0, float(2**62)))
    assert "step-1" in _runs("ls", str(tmp_path / "run"))
    assert json.loads(_runs("ls", str(tmp_path / "run"), "--json"))["steps"][0]["name"] == "step-1"
    (tmp_path / "run" / "step-1" / ".metadata").unlink()
    for command in ("ls", "clean"):
        _runs(command, str(tmp_path / "run") if command == "ls" else str(tmp_path / "run" / "step-1"))
    _runs("recover", str(tmp_path / "run" / "step-1"))
