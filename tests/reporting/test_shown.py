"""What a notebook and `print` show of the values that users get."""

from __future__ import annotations

import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import open_checkpoint, save
from dcp_nvcomp.calls.tables import Column, Shown, Table, left
from dcp_nvcomp.runs import list_run
from dcp_nvcomp.tools import compare, inspect, recover, verify
from tests.cli.checkpoints import run

KEY = "model.<script>&.w"


class Cells(HTMLParser):
    """The rows of all tables, and the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def shown_by(value: Shown) -> tuple[str, Cells]:
    return str(value), Cells(value._repr_html_())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save({KEY: torch.arange(5000.0), "step": 3}, tmp_path / "run" / "step-3", no_dist=True)
    return tmp_path / "run" / "step-3"


VALUES: dict[str, Callable[[Path], Shown]] = {
    "inspection": inspect,
    "checkpoint": open_checkpoint,
    "run": lambda path: list_run(path.parent),
    "verification": verify,
    "recovery": recover,
    "comparison": lambda path: compare(path, path),
}


@pytest.mark.parametrize("name", VALUES)
def test_every_value_is_text_and_html_of_the_same(saved: Path, name: str) -> None:
    value = VALUES[name](saved)
    text, cells = shown_by(value)
    assert cells.tags <= {"p", "table", "thead", "tbody", "tr", "th", "td"}
    assert not text.startswith(type(value).__name__)
    for row in cells.rows:
        assert all(cell in text for cell in row)
    if name in ("inspection", "checkpoint"):
        assert KEY in text and any(row[0] == KEY for row in cells.rows)
    assert ("step-3" in text) == (name not in ("recovery", "comparison"))


def test_the_command_prints_the_same(saved: Path) -> None:
    for command, value in (("inspect", inspect(saved)), ("verify", verify(saved))):
        status, output, _ = run(command, str(saved))
        assert status == 0 and output.rstrip("\n") == str(value)


def test_a_save_as_the_last_line_of_a_cell(tmp_path: Path) -> None:
    stats = save({KEY: torch.arange(5000.0)}, tmp_path, no_dist=True)
    assert repr(stats).count("\n") == 0 and repr(stats).startswith("<SaveStats: saved 20.0 kB as ")
    assert shown_by(stats)[1].rows[0] == ["codec", "shards", "before", "after", "ratio"]


def test_differences_are_rows(saved: Path, tmp_path: Path) -> None:
    save({KEY: torch.zeros(5000), "step": 3}, tmp_path / "other", no_dist=True)
    text, cells = shown_by(compare(saved, tmp_path / "other"))
    assert cells.rows[1][:2] == [KEY, "values"]
    assert text.endswith("1 key is equal in its values, 1 differ.")


def test_long_tables_are_cut_in_the_middle() -> None:
    rows = [(f"key-{number}", str(number)) for number in range(1000)]
    table = Table([left("key"), Column("size")], rows)
    cut = table.shortened().rows
    assert [row[0] for row in cut[:2]] == ["key-0", "key-1"] and cut[-1][0] == "key-999"
    assert len(cut) == 61 and cut[30][0] == "... 940 more"
    assert Table(table.columns, rows[:60]).shortened().rows == rows[:60]


def test_a_copied_run_shows_when_its_steps_were_saved(saved: Path) -> None:
    (step,) = list_run(saved.parent).steps
    for file in saved.iterdir():
        os.utime(file, (0, 0))
    (copied,) = list_run(saved.parent).steps
    assert copied.saved_seconds == 0 and copied.committed_seconds == step.committed_seconds
    assert "1970" not in str(list_run(saved.parent))
