"""What the kill matrix found, each in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, StorageError
from dcp_nvcomp.runs.background.stages import FastStage
from dcp_nvcomp.runs.own_files import REMOVING
from dcp_nvcomp.runs.steps import remove_step
from dcp_nvcomp.storage.base import temporary_name
from dcp_nvcomp.storage.open import open_filesystem

STATE = {"w": torch.arange(100.0)}


def _manager(place: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        place / "run", every=1000, fast=place / "node-0", fast_every=1, fast_keep=2, preemption_signals=(), **options
    )


def _save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, STATE)
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
    with _manager(tmp_path) as manager:
        _save(manager, 1, 2)
    (tmp_path / "node-0" / "step-1" / ".metadata").unlink()
    (tmp_path / "node-0" / "step-1" / left).touch()
    with _manager(tmp_path) as manager:
        assert manager.restore({"w": torch.zeros(100)}) is not None
        _save(manager, 3)
    assert _fast_steps(tmp_path) == ["step-2", "step-3"]


def test_a_step_without_its_copies_pushes_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise StorageError("the peer is gone")

    with _manager(tmp_path, copies=1) as manager:
        _save(manager, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(FastStage, "_copy", fail)
            _save(manager, 3)
        assert _fast_steps(tmp_path) == ["step-1", "step-2", "step-3"]
        _save(manager, 4)
        assert _fast_steps(tmp_path) == ["step-2", "step-3", "step-4"]
        _save(manager, 5)
    assert _fast_steps(tmp_path) == ["step-4", "step-5"]
