"""`dcp-nvcomp prune` and `pin`, and what `ls` says of a managed run."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import Best, CheckpointManager, CheckpointNotFoundError, ConfigurationError, Keep
from dcp_nvcomp.format.names import REMOVING
from dcp_nvcomp.runs import list_run, pin_step, prune_run
from tests.cli.checkpoints import run


@pytest.fixture
def managed(made: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(made, tmp_path / "run"))


command = partial(run, width=200)


def steps(path: Path) -> list[int | None]:
    return [step.step for step in list_run(path).steps]


def test_ls_shows_metrics_and_why_a_step_is_kept(managed: Path) -> None:
    code, out, _ = command("ls", managed)
    lines = out.splitlines()
    assert code == 0 and "metrics" in lines[0] and "kept" in lines[0]
    assert any("step-30" in line and "loss 0" in line and "best loss" in line for line in lines)
    document = json.loads(command("ls", managed, "--json")[1])
    by_step = {step["step"]: step for step in document["steps"]}
    assert by_step[30]["kept"] == ["last 5", "best loss"] and by_step[60]["metrics"] == {"loss": 3.0}


def test_prune_says_what_would_go_and_then_removes_it(managed: Path) -> None:
    arguments = ("prune", managed, "--keep-last", 1, "--keep-best", "loss:min:2", "--milestone", 50)
    code, out, _ = command(*arguments, "--dry-run")
    assert code == 0 and "1 step would go" in out
    assert steps(managed) == [20, 30, 40, 50, 60]
    code, out, _ = command(*arguments, "--json")
    document = json.loads(out)
    assert [one["step"] for one in document["removed"]] == [20]
    assert {one["step"]: one["reasons"] for one in document["kept"]}[40] == ["best loss"]
    assert steps(managed) == [30, 40, 50, 60]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (("--keep-last", 2), [50, 60]),
        (("--keep-last", 1, "--keep-every", 20), [20, 40, 60]),
        (("--keep-last", 1, "--keep-best", "loss:max"), [60]),
        (("--keep-last", 1, "--newer-than", "1h"), [20, 30, 40, 50, 60]),
    ],
)
def test_rules(managed: Path, arguments: tuple[Any, ...], kept: list[int]) -> None:
    assert command("prune", managed, *arguments)[0] == 0
    assert steps(managed) == kept


def test_what_is_pinned_stays_until_it_is_not(managed: Path) -> None:
    assert command("pin", managed, 40) == (0, "step 40 is pinned\n", "")
    command("prune", managed, "--keep-last", 1)
    assert steps(managed) == [40, 60]
    assert "pinned" in command("ls", managed)[1]
    with CheckpointManager(managed, every=10, keep=Keep(last=1)) as manager:
        manager.save(70, {"w": torch.zeros(1000)})
    assert steps(managed) == [40, 70], "a manager sees it too"
    assert command("pin", managed, 40, "--remove")[0] == 0
    command("prune", managed, "--keep-last", 1)
    assert steps(managed) == [70]


def test_only_a_complete_step_can_be_pinned(managed: Path) -> None:
    code, _, error = command("pin", managed, 45)
    assert code == 1 and "no checkpoint of step 45" in error
    (managed / "step-40" / REMOVING).touch()
    with pytest.raises(CheckpointNotFoundError):
        pin_step(managed, 40)
    assert not list((managed / ".run").glob("pin-*"))


def test_a_metric_that_no_step_has_removes_nothing(managed: Path) -> None:
    before = steps(managed)
    code, _, error = command("prune", managed, "--keep-last", 1, "--keep-best", "los:min:2")
    assert code == 1 and "No step has the metric 'los'" in error and "have: loss" in error
    with pytest.raises(ConfigurationError, match="'accuracy'"):
        prune_run(managed, Keep(best=(Best("loss"), Best("accuracy", "max"))))
    assert steps(managed) == before
    assert not prune_run(managed, Keep(last=len(before), best=Best("accuracy"))).removed, "nothing is to go"


def test_a_metric_that_is_nan_is_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=10) as manager:
        for step in (10, 20):
            manager.save(step, {"w": torch.zeros(3)}, metrics={"loss": float("nan")})
    assert [saved.step for saved in prune_run(tmp_path, Keep(best=Best("loss"))).removed] == [10]


def test_prune_finishes_removals_that_were_cut_short(managed: Path) -> None:
    (managed / "step-20" / ".metadata").unlink()
    (managed / "step-20" / REMOVING).touch()
    assert [saved.step for saved in prune_run(managed, Keep(last=100), dry_run=True).removed] == [20]
    assert (managed / "step-20").exists()
    prune_run(managed, Keep(last=100))
    assert not (managed / "step-20").exists() and steps(managed) == [30, 40, 50, 60]


def test_the_newest_stays_whatever_a_callable_says(managed: Path) -> None:
    found = prune_run(managed, lambda steps: [])
    assert [saved.step for saved in found.removed] == [20, 30, 40, 50]
    assert found.kept == {60: ("newest",)} and found.nbytes > 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--keep-last", 0), 2, "keep-last"),
        (("--keep-last", 1, "--newer-than", "soon"), 2, "newer-than"),
        (("--keep-last", 1, "--keep-best", "loss:min:x"), 2, "keep-best"),
        (("--keep-last", 1, "--keep-best", "loss:least"), 1, "least"),
    ],
)
def test_wrong_command_lines(made: Path, arguments: tuple[Any, ...], code: int, words: str) -> None:
    found, _, error = command("prune", made, *arguments)
    assert found == code and words in error


def test_nothing_to_prune(tmp_path: Path) -> None:
    assert command("prune", tmp_path, "--keep-last", 1)[0] == 1
    with pytest.raises(ConfigurationError, match="safe_objects"):
        prune_run(tmp_path, Keep(), storage_options={"safe_objects": True})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the steps 10 to 60, whose loss is lowest at 30."""
    path = tmp_path_factory.mktemp("run")
    with CheckpointManager(path, every=10, keep=Keep(last=5, best=Best("loss"))) as manager:
        for step in range(10, 61, 10):
            manager.save(step, {"w": torch.zeros(1000)}, metrics={"loss": abs(step - 30) / 10})
    return path
