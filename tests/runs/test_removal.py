"""Removing a step: cut short at every system call, it is there whole or not at all, and the next start finishes it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import (
    Best,
    CheckpointManager,
    CheckpointNotFoundError,
    Keep,
    NvcompWriter,
    StorageError,
    async_save,
    convert,
    load,
    save,
)
from dcp_nvcomp.format.metadata.shares import is_being_removed
from dcp_nvcomp.format.names import REMOVING
from dcp_nvcomp.runs import SavedStep, pin_step, prune_run
from dcp_nvcomp.runs.background import stages
from dcp_nvcomp.runs.background.stages import FastStage
from dcp_nvcomp.runs.own_files import pin
from dcp_nvcomp.runs.steps import StepNames, remove_step
from dcp_nvcomp.runs.tiers import durable as durable_tier
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.storage.base import temporary_name
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from dcp_nvcomp.tools import recover
from tests.checkpoints import assert_loads
from tests.faults.intercept import POSIX_CALLS, intercept_system_calls
from tests.runs.jobs import steps_in

STATE = {"w": torch.arange(5000.0), "name": "x"}


class Killed(BaseException):
    """The process ends here."""


def _saved(path: Path) -> Path:
    save(STATE, path, no_dist=True, single_file_per_rank=False)
    return path


def _loads(path: Path) -> bool:
    target = {"w": torch.zeros(5000), "name": ""}
    try:
        load(target, path, no_dist=True)
    except CheckpointNotFoundError:
        return False
    assert torch.equal(target["w"], STATE["w"])
    return True


def _killed_at(number: int, path: Path, *, done: bool) -> bool:
    """Remove a step in a process that dies at one of its calls; False if there are not as many."""
    count = 0

    def hook(name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count != number:
            if count > number:
                raise Killed
            return call(*args, **kwargs)
        if done:
            _close(name, call(*args, **kwargs))
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        intercept_system_calls(patch.setattr, hook, POSIX_CALLS | {"rmdir"})
        try:
            remove_step(open_filesystem(path))
        except Killed:
            return True
    return False


def _close(name: str, result: Any) -> None:
    """Give back what a dead process would not hold."""
    if name == "open":
        os.close(result)
    elif hasattr(result, "close"):
        result.close()


@pytest.mark.ci
@pytest.mark.parametrize("done", [False, True])
def test_a_removal_killed_at_any_call_leaves_no_half_visible_step(tmp_path: Path, done: bool) -> None:
    whole = _saved(tmp_path / "whole")
    number = visible = gone = 0
    while True:
        number += 1
        run = tmp_path / f"run-{number}"
        step = run / "step-7"
        shutil.copytree(whole, step)
        if not _killed_at(number, step, done=done):
            break
        if _loads(step):
            visible += 1
        else:
            gone += 1
        marked = is_being_removed(open_filesystem(step))
        with CheckpointManager(run) as manager:
            left = [saved.step for saved in manager.steps()]
        assert left == ([] if marked or not _has_files(step) else [7])
        assert _loads(step) == (left == [7]), "not begun: the step is as it was"
        assert left or not _has_files(step), "begun: it is finished"
    assert number > 30 and visible and gone
    assert not step.exists()


def _has_files(path: Path) -> bool:
    return path.exists() and any(path.iterdir())


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    path = _saved(tmp_path / "step-1")
    (path / "notes.txt").write_text("keep me")
    remove_step(open_filesystem(path))
    assert [file.name for file in path.iterdir()] == ["notes.txt"]


def test_a_save_into_a_step_whose_removal_was_cut_short_stays(tmp_path: Path) -> None:
    step = _saved(tmp_path / "step-2")
    (step / ".metadata").unlink()
    (step / REMOVING).touch()
    # a manager would finish this at its start: this one finds the mark only when it saves
    with CheckpointManager(tmp_path / "elsewhere", every=1) as manager:
        manager._durable.root = str(tmp_path)
        manager.save(2, STATE).saved.result(60)
    with CheckpointManager(tmp_path) as manager:
        assert [saved.step for saved in manager.steps()] == [2]
    assert_loads(step, STATE)


def _recovered(step: Path) -> None:
    save(STATE, step, no_dist=True)
    (step / ".metadata").unlink()
    (step / REMOVING).touch()
    assert recover(step).outcome == "recovered"


AGAIN: dict[str, Callable[[Path], object]] = {
    "save": lambda step: save(STATE, step, no_dist=True),
    "async_save": lambda step: async_save(STATE, step, no_dist=True).upload_completion.result(60),
    "convert": lambda step: convert(_saved(step.with_name("other")), step),
    "convert to stock DCP": lambda step: convert(_saved(step.with_name("other")), step, to="dcp"),
    "recover": _recovered,
}


@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
def test_what_is_put_by_hand_where_a_removal_was_cut_short_stays(tmp_path: Path, again: Callable[[Path], None]) -> None:
    step = tmp_path / "step-2"
    step.mkdir()
    (step / REMOVING).touch()
    again(step)
    assert not (step / REMOVING).exists()
    _saved(tmp_path / "step-1")
    assert prune_run(tmp_path, Keep(last=9)).removed == ()
    with CheckpointManager(tmp_path) as manager:
        assert [saved.step for saved in manager.steps()] == [1, 2]
    assert_loads(step, STATE)


def test_a_rank_without_collectives_ends_a_removal_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / REMOVING).touch()
    dcp.save(STATE, storage_writer=NvcompWriter(tmp_path / "step-2"), no_dist=True, use_collectives=False)
    _saved(tmp_path / "step-1")
    assert prune_run(tmp_path, Keep(last=9)).removed == ()
    assert (tmp_path / "step-2" / "__0.metadata").exists()


def test_what_a_removal_left_goes_although_no_step_is_complete(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        prune_run(tmp_path, Keep(last=1))
    step = _saved(tmp_path / "step-1")
    (step / ".metadata").unlink()
    (step / REMOVING).touch()
    assert [saved.step for saved in prune_run(tmp_path, Keep(last=1)).removed] == [1]
    assert not step.exists()


def test_what_is_pinned_or_loaded_is_not_removed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, keep=Keep(last=1)) as manager:
        manager.save(1, STATE).saved.result(60)
        with manager._durable.held(1):
            manager.save(2, STATE)
            manager.wait()
            assert [saved.step for saved in manager.steps()] == [1, 2]
        manager.save(3, STATE)
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [3]
        assert manager.report().removed == {"durable": 2}
    target = {"w": torch.zeros(5000), "name": ""}
    load(target, tmp_path / "step-3", no_dist=True)
    assert torch.equal(target["w"], STATE["w"])


def test_a_save_waits_for_no_removal_of_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        _saved(tmp_path / f"step-{step}")
    durable = DurableTier(str(tmp_path), StepNames())
    begun, may_end, events = threading.Event(), threading.Event(), list[str]()
    remove_one = DurableTier._remove_one

    def slow(*arguments: Any) -> bool:
        begun.set()
        assert may_end.wait(60)
        events.append("removed")
        return remove_one(*arguments)

    monkeypatch.setattr(DurableTier, "_remove_one", slow)
    removing = threading.Thread(target=durable.remove, args=({1: "old"},))
    removing.start()
    assert begun.wait(60)
    with durable.held(2):
        assert durable.remove({1: "old", 2: "old"}).steps == ()

    def hold() -> None:
        with durable.held(1):
            events.append("held")

    holding = threading.Thread(target=hold)
    holding.start()
    holding.join(0.2)
    may_end.set()
    removing.join(60)
    holding.join(60)
    assert events == ["removed", "held"] and steps_in(tmp_path) == [2]


def test_what_can_not_be_written_down_keeps_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full, and removing what is old would make room."""

    def full(*arguments: Any) -> None:
        raise StorageError("No space left", path=str(tmp_path), errno=errno.ENOSPC)

    with CheckpointManager(tmp_path, every=10, keep=Keep(last=1)) as manager:
        _save(manager, 10, 1.0)
        monkeypatch.setattr(stages, "write_kept", full)
        _save(manager, 20, 1.0)
    assert steps_in(tmp_path) == [20] and manager.report().removed == {"durable": 1}


def _save(manager: CheckpointManager, step: int, loss: float) -> None:
    manager.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": loss})
    manager.wait()


def _cut(run: Path, step: int) -> None:
    file = run / f"step-{step}" / ".metadata"
    os.truncate(file, file.stat().st_size // 2)


def test_what_was_removed_beside_a_job_is_not_counted_by_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=10, keep=Keep(last=3, best=Best("loss"))) as manager:
        for step in (10, 20, 30, 40):
            _save(manager, step, step / 100)
        prune_run(tmp_path, lambda steps: [20, 30, 40])
        assert steps_in(tmp_path) == [20, 30, 40]
        _save(manager, 50, 0.5)
    assert steps_in(tmp_path) == [20, 30, 40, 50], "20 is the best of those that are there"


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
        assert steps_in(tmp_path) == [10, 20]


def test_without_a_rule_nothing_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path, every=10) as manager:
        monkeypatch.setattr(DurableTier, "list", None)
        for step in (10, 20):
            _save(manager, step, 1.0)
        monkeypatch.undo()
        kept = prune_run(tmp_path, Keep(last=1), dry_run=True)
    assert steps_in(tmp_path) == [10, 20] and [saved.step for saved in kept.removed] == [10]


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
    assert steps_in(tmp_path) == [1, 2]
    assert prune_run(tmp_path, Keep(last=1)).kept == {1: ("pinned",), 2: ("last 1",)}


# --- in the fast tier ---


def _with_fast_tier(place: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        place / "run", every=1000, fast=place / "node-0", fast_every=1, fast_keep=2, preemption_signals=(), **options
    )


def _save_steps(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, {"w": torch.arange(100.0)})
    manager.wait()


def _fast_steps(place: Path) -> list[str]:
    return sorted(folder.name for folder in (place / "node-0").glob("step-*"))


def test_a_mark_that_was_being_written_goes_with_the_step(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    step.mkdir()
    (step / temporary_name(REMOVING)).touch()
    remove_step(open_filesystem(step))
    assert not step.exists()


@pytest.mark.parametrize("left", [REMOVING, "__0_0_" + "0" * 32 + ".distcp"])
def test_what_dead_jobs_left_in_the_fast_tier_goes(tmp_path: Path, left: str) -> None:
    with _with_fast_tier(tmp_path) as manager:
        _save_steps(manager, 1, 2)
    (tmp_path / "node-0" / "step-1" / ".metadata").unlink()
    (tmp_path / "node-0" / "step-1" / left).touch()
    with _with_fast_tier(tmp_path) as manager:
        assert manager.restore({"w": torch.zeros(100)}) is not None
        _save_steps(manager, 3)
    assert _fast_steps(tmp_path) == ["step-2", "step-3"]


def test_a_step_without_its_copies_pushes_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise StorageError("the peer is gone")

    with _with_fast_tier(tmp_path, copies=1) as manager:
        _save_steps(manager, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(FastStage, "_copy", fail)
            _save_steps(manager, 3)
        assert _fast_steps(tmp_path) == ["step-1", "step-2", "step-3"]
        _save_steps(manager, 4)
        assert _fast_steps(tmp_path) == ["step-2", "step-3", "step-4"]
        _save_steps(manager, 5)
    assert _fast_steps(tmp_path) == ["step-4", "step-5"]


def test_a_step_whose_summary_cannot_be_read_is_not_taken_for_one_without_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `best`, it would go."""
    keep = Keep(last=1, best=Best("loss", "min"))
    with CheckpointManager(tmp_path, every=1, keep=keep, run_id="job") as manager:
        manager.save(1, STATE, metrics={"loss": 0.1})
        manager.save(2, STATE, metrics={"loss": 0.5})
    read, failed = PosixFilesystem.read, list[str]()

    def fails_once(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        if name == "step-1/.metadata" and not failed:
            failed.append(name)
            raise StorageError("Input/output error", path=name)
        return read(self, name, start, stop)

    with CheckpointManager(tmp_path, every=1, keep=keep, run_id="job") as manager:
        monkeypatch.setattr(PosixFilesystem, "read", fails_once)
        manager._durable._seen = None
        manager.save(3, STATE, metrics={"loss": 0.7})
    assert failed and steps_in(tmp_path) == [1, 3]
