"""Accelerate, whose `save_state` names stock DCP's classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start

pytestmark = pytest.mark.ci


def test_saved_killed_and_resumed(tmp_path: Path) -> None:
    needs("accelerate", "accelerate==1.15.0")
    start("accelerate", tmp_path, "train", killed=True)
    start("accelerate", tmp_path, "resume")
    check_resumed(tmp_path, saved=3, last=5)
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        check_ours(checkpoints / "checkpoint_2" / part)
    check_cleaned(tmp_path, checkpoints / "checkpoint_2" / "optimizer_0")
