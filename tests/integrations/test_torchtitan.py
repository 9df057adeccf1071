"""torchtitan's own trainer, with our override and, unmodified, with a `dcpz://` URL. See `make test-frameworks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, printed, start

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
    found = {path.name for path in checkpoints.iterdir()}
    assert found >= {"step-2", "step-3"}
    if mode == "disabled":  # else keep_latest_k looks before the newest one is there, and removes it a save later
        assert "step-1" not in found
    check_ours(checkpoints / "step-3")
    check_cleaned(tmp_path, checkpoints / "step-3")


def test_a_torchtitan_that_loads_otherwise_is_refused_before_a_save() -> None:
    needs("torchtitan", "torchtitan==0.3.0")
    assert "has no method dcp_load" in printed("-c", OTHERWISE), "elsewhere: what it imports is not for this process"


OTHERWISE = """
from tests.integrations.jobs.torchtitan import on_a_cpu

on_a_cpu()

from torchtitan.components.checkpointer.dcp import CheckpointManager

from dcp_nvcomp import ConfigurationError
from dcp_nvcomp.integrations.torchtitan import NvcompCheckpointManager

del CheckpointManager.dcp_load
try:
    NvcompCheckpointManager(NvcompCheckpointManager.Config(enable=True))
except ConfigurationError as error:
    print(error)
"""
