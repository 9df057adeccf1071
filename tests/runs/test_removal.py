"""Removing a step: cut short at every system call, it is there whole or not at all, and the next start finishes it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, CheckpointNotFoundError, Keep, load, save
from dcp_nvcomp.runs.own_files import REMOVING, is_being_removed
from dcp_nvcomp.runs.steps import remove_step
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads
from tests.faults.intercept import POSIX_CALLS, intercept_system_calls

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
