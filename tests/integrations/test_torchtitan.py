"""torchtitan's own trainer, with our override and, unmodified, with a `dcpz://` URL. See `make test-frameworks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize(
    ("which", "mode"),
    [("override", "disabled"), ("override", "async"), ("override", "async_with_pinned_mem"), ("url", "disabled")],
)
def test_saved_killed_and_resumed(tmp_path: Path, which: str, mode: str) -> None:
    needs("torchtitan", "torchtitan==0.3.0")
    start("torchtitan", tmp_path, "train", which, mode, killed=True)
    start("torchtitan", tmp_path, "resume", which, mode)
    check_resumed(tmp_path, saved=3, last=5)
    checkpoints = tmp_path / "checkpoint"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-3"]  # keep_latest_k
    check_ours(checkpoints / "step-3")
    check_cleaned(tmp_path, checkpoints / "step-3")
