"""Transformers' Trainer, which saves through Accelerate's functions, and what it puts beside the checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start

pytestmark = pytest.mark.ci


def test_saved_killed_and_resumed(tmp_path: Path) -> None:
    needs("transformers", "transformers==5.24.0")
    needs("accelerate", "accelerate==1.15.0")
    start("transformers", tmp_path, "train", killed=True)
    start("transformers", tmp_path, "resume")
    check_resumed(tmp_path, saved=3, last=5)
    run = tmp_path / "run"
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        check_ours(run / "checkpoint-3" / part)
    check_cleaned(run, run / "checkpoint-3" / "optimizer_0")
