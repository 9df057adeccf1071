"""Nothing is removed on the strength of an old list, or for a step that is not whole; and the log says why it went."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import Best, CheckpointManager, Keep, SavedStep, StorageError, list_run, load, pin_step, prune_run, save
from dcp_nvcomp.runs.own_files import REMOVING, pin
from dcp_nvcomp.runs.steps import StepNames
from dcp_nvcomp.runs.tiers import durable as durable_tier
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.storage.open import open_filesystem


def _save(manager: CheckpointManager, step: int, loss: float) -> None:
    manager.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": loss})
    manager.wait()


def _steps(run: Path) -> list[int | None]:
    return [step.step for step in list_run(run).steps]


def _cut(run: Path, step: int) -> None:
    file = run / f"step-{step}" / ".metadata"
    os.truncate(file, file.stat().st_size // 2)


def test_what_was_removed_beside_a_job_is_not_counted_by_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=10, keep=Keep(last=3, best=Best("loss"))) as manager:
        for step in (10, 20, 30, 40):
            _save(manager, step, step / 100)
        prune_run(tmp_path, lambda steps: [20, 30, 40])
        assert _steps(tmp_path) == [20, 30, 40]
        _save(manager, 50, 0.5)
    assert _steps(tmp_path) == [20, 30, 40, 50], "20 is the best of those that are there"


def test_what_was_harmed_beside_a_job_is_not_counted_by_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=10, keep=Keep(last=2)) as manager:
        for step in (10, 20):
            _save(manager, step, 1.0)
        _cut(tmp_path, 20)
        _save(manager, 30, 1.0)
        assert [saved.step for saved in manager.steps()] == [10, 30]


@pytest.mark.parametrize("harmed", [(30,), (30, 20), (30, 20, 10)])
def test_the_newest_is_opened_before_others_go(tmp_path: Path, harmed: tuple[int, ...]) -> None:
    with CheckpointManager(tmp_path, every=10) as manager:
        for step in (10, 20, 30):
            _save(manager, step, 1.0)
    durable = DurableTier(str(tmp_path), StepNames())
    found = durable.list()
    for step in harmed:
        _cut(tmp_path, step)
    doomed = durable.decide(Keep(last=1), found)
    whole = [step for step in (10, 20, 30) if step not in harmed]
    assert doomed.steps == tuple(whole[:-1])
    assert not whole or set(doomed.kept) == {whole[-1]}


def test_if_a_list_fails_nothing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path, every=10, keep=Keep(last=1)) as manager:
        _save(manager, 10, 1.0)
        monkeypatch.setattr(DurableTier, "list", None)
        _save(manager, 20, 1.0)
        monkeypatch.undo()
        assert _steps(tmp_path) == [10, 20]


def test_without_a_rule_nothing_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path, every=10) as manager:
        monkeypatch.setattr(DurableTier, "list", None)
        for step in (10, 20):
            _save(manager, step, 1.0)
        monkeypatch.undo()
        kept = prune_run(tmp_path, Keep(last=1), dry_run=True)
    assert _steps(tmp_path) == [10, 20] and [saved.step for saved in kept.removed] == [10]


def test_the_log_and_the_result_say_why_a_step_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = Keep(last=2, every=100, newer_than=0.001, best=Best("loss"), milestones=[7])
    rules = "last 2, every 100, newer than 0:00:00.001000 before the newest, best 1 by loss (min), milestones"
    why = f"no rule keeps it: {rules}"
    with caplog.at_level(logging.INFO, "dcp_nvcomp"), CheckpointManager(tmp_path, every=10, keep=rule) as manager:
        for step in (10, 20, 30, 40):
            _save(manager, step, 1 / step)
    assert [record.getMessage() for record in caplog.records if "was removed" in record.getMessage()] == [
        f"Step {step} was removed: {why}." for step in (10, 20)
    ]
    pruned = prune_run(tmp_path, Keep(last=1))
    assert pruned.why == {30: "no rule keeps it: last 1"}
    assert pruned.to_json()["removed"][0]["reason"] == "no rule keeps it: last 1"


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=10) as manager:
        for step in (10, 20):
            _save(manager, step, 1.0)
    before = _files(tmp_path)
    assert prune_run(tmp_path, Keep(last=1), dry_run=True).why == {10: "no rule keeps it: last 1"}
    assert _files(tmp_path) == before
    pin_step(tmp_path, 10)
    assert prune_run(tmp_path, Keep(last=1), dry_run=True).why == {}, "nor does it promise what would not go"


def test_a_dry_run_shows_removals_that_would_be_finished(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=10) as manager:
        for step in (10, 20, 30):
            _save(manager, step, 1.0)
    for step in (10, 20):
        (tmp_path / f"step-{step}" / REMOVING).touch()
    pin(DurableTier(str(tmp_path), StepNames()).open_own(), open_filesystem(tmp_path), 20, str)
    shown = prune_run(tmp_path, Keep(last=1), dry_run=True)
    assert shown.why == {10: "its removal had begun"} and [saved.step for saved in shown.removed] == [10]
    done = prune_run(tmp_path, Keep(last=1))
    assert (done.removed, done.why) == (shown.removed, shown.why)


def _files(run: Path) -> dict[str, Any]:
    return {str(file): file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_a_step_that_is_saved_again_after_the_list_stays(tmp_path: Path) -> None:
    """As by a job that went back, beside an operator's `prune`."""
    state = {"w": torch.ones(3)}
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        for step in (1, 2, 3):
            manager.save(step, state)

    def rule(steps: Sequence[SavedStep]) -> list[int]:
        save({"w": torch.zeros(3)}, tmp_path / "step-1", no_dist=True)
        return [3]

    assert [one.step for one in prune_run(tmp_path, rule).removed] == [2]
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-1", "step-3"}
    load(state, tmp_path / "step-1", no_dist=True)
    assert not state["w"].any()


def test_a_look_that_fails_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start would go on with the removal of a step that is pinned."""
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)})
    pin_step(tmp_path, 1)

    def fails(*arguments: object) -> bool:
        raise StorageError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(durable_tier, "is_pinned", fails)
        patch.setattr(durable_tier, "pinned_steps", lambda own: set())
        assert list(prune_run(tmp_path, Keep(last=1)).failed) == [1]
    assert not list(tmp_path.glob(f"step-*/{REMOVING}"))
    assert _steps(tmp_path) == [1, 2]
    assert prune_run(tmp_path, Keep(last=1)).kept == {1: ("pinned",), 2: ("last 1",)}
