"""`dcp-nvcomp ls`: the checkpoints of a run, from a few KB of each."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dcp_nvcomp import CheckpointNotFoundError, Keep, save
from dcp_nvcomp.cli.app import app
from dcp_nvcomp.runs import list_run, prune_run
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import save_stock
from tests.cli.checkpoints import run as run_command

STATE = {"w": torch.zeros(100_000), "step": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps of every kind."""
    for step in (2, 10):
        save(STATE, tmp_path / f"step-{step}", no_dist=True)
    save_stock(tmp_path / "step-1", STATE)
    save(STATE, tmp_path / "step-11", no_dist=True)
    (tmp_path / "step-11" / ".metadata").unlink()  # died before it was published
    save(STATE, tmp_path / "step-12", no_dist=True)
    next((tmp_path / "step-12").glob("*.distcp")).unlink()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.txt").write_text("x")
    return tmp_path


ls = partial(run_command, "ls")


def test_steps_in_natural_order(run: Path) -> None:
    found = list_run(run)
    assert [step.name for step in found.steps] == ["step-1", "step-2", "step-10", "step-11", "step-12"]
    assert [step.step for step in found.steps] == [1, 2, 10, 11, 12]
    assert [step.state for step in found.steps] == ["complete", "complete", "complete", "incomplete", "damaged"]
    stock, ours, *_ = found.steps
    assert (stock.uncompressed_nbytes, stock.ratio, stock.ranks, stock.keys) == (None, None, 1, None)
    assert stock.stored_nbytes > 400_000
    assert (ours.ranks, ours.keys) == (1, 2)
    assert ours.stored_nbytes == sum(file.stat().st_size for file in (run / "step-2").glob("*.distcp"))
    assert ours.ratio is not None and ours.ratio > 50
    assert ours.saved_seconds == pytest.approx((run / "step-2" / ".metadata").stat().st_mtime)


def test_what_is_not_whole(tmp_path: Path) -> None:
    save(STATE, tmp_path / "step-1", no_dist=True)
    (tmp_path / "step-1" / ".metadata").write_bytes(b"")
    save_stock(tmp_path / "step-2", STATE)
    for file in (tmp_path / "step-2").glob("*.distcp"):
        file.unlink()
    save({}, tmp_path / "step-3", no_dist=True)
    assert [step.state for step in list_run(tmp_path).steps] == ["damaged", "damaged", "complete"]


def test_of_what_was_seen_complete_a_few_kb_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune_run(run, Keep(last=10))  # writes down what it has seen
    reads: list[tuple[str, int]] = []
    read, read_all = PosixFilesystem.read, PosixFilesystem.read_all

    def counted(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        reads.append((name, stop - start))
        return read(self, name, start, stop)

    def counted_whole(self: PosixFilesystem, name: str, *, limit_nbytes: int) -> bytes:
        reads.append((name, -1))
        return read_all(self, name, limit_nbytes=limit_nbytes)

    monkeypatch.setattr(PosixFilesystem, "read", counted)
    monkeypatch.setattr(PosixFilesystem, "read_all", counted_whole)
    assert len(list_run(run).steps) == 5
    whole = {name for name, nbytes in reads if nbytes == -1}
    assert whole == {".run/seen", "step-12/.metadata"}, "only what is not complete is opened again"
    small = sorted(name for name, nbytes in reads if 0 < nbytes <= 4096)
    assert small == [f"step-{step}/.metadata" for step in (1, 10, 2)]


def test_the_table(run: Path) -> None:
    status, output, errors = ls(str(run))
    assert (status, errors) == (0, "")
    heading, *rows, problem = output.splitlines()
    assert problem.startswith("step-12 is damaged: The data file ")
    assert heading.split() == ["checkpoint", "saved", "before", "size", "ratio", "ranks", "keys", "state"]
    assert [row.split()[0] for row in rows] == ["step-1", "step-2", "step-10", "step-11", "step-12"]
    assert rows[0].split()[-4:] == ["-", "1", "-", "complete"]


def test_a_checkpoint_itself_and_deeper_ones(run: Path) -> None:
    assert [step.name for step in list_run(run / "step-2").steps] == [""]
    shutil.move(str(run / "step-2"), str(run / "a" / "b"))
    assert "a/b" in [step.name for step in list_run(run).steps]
    assert ls(str(run / "a" / "b"))[1].splitlines()[1].startswith(".")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        list_run(tmp_path)
    status, output, errors = ls(str(tmp_path / "nothing"))
    assert (status, output) == (1, "")
    assert errors.startswith("Error: There is no checkpoint at or below this path.")


def test_inspect_of_a_run_lists_it(run: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(run)])
    assert result.exit_code == 0
    assert f"{run} is no checkpoint itself; these are below it:" in result.stdout
    assert "step-10" in result.stdout
    (run / "empty").mkdir()
    assert CliRunner().invoke(app, ["inspect", str(run / "empty")]).exit_code == 1
