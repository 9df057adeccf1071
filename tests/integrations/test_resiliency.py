"""nvidia-resiliency-ext, whose queue writes in a forked child or in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("queue", ["fork", "persistent"])
def test_saved_killed_and_resumed(tmp_path: Path, queue: str) -> None:
    needs("nvidia_resiliency_ext", "--no-deps nvidia-resiliency-ext==0.4.1")
    start("resiliency", tmp_path, "train", queue, killed=True)
    start("resiliency", tmp_path, "resume", queue)
    check_resumed(tmp_path, saved=2, last=4)
    for step in (1, 2):
        check_ours(tmp_path / f"step-{step}")
    check_cleaned(tmp_path, tmp_path / "step-2")
