"""torchtune's checkpointer for intermediate checkpoints. See `make test-frameworks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start

pytestmark = pytest.mark.frameworks


def test_saved_killed_and_resumed(tmp_path: Path) -> None:
    needs("torchtune", "torchtune==0.6.1 torchao==0.15.0")
    start("torchtune", tmp_path, "train", killed=True)
    start("torchtune", tmp_path, "resume")
    check_resumed(tmp_path, saved=2, last=4)
    for step in (1, 2):
        check_ours(tmp_path / f"dist_epoch_{step}")
    check_cleaned(tmp_path, tmp_path / "dist_epoch_2")
