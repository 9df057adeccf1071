"""Megatron-core's `dist_checkpointing`: with our strategies, with ours as its defaults, and asynchronously."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start


@pytest.mark.parametrize("how", ["strategies", "registered", "asynchronous"])
def test_saved_killed_and_resumed(tmp_path: Path, how: str) -> None:
    needs("megatron.core", "megatron-core==0.16.1")
    start("megatron", tmp_path, "train", how, killed=True)
    start("megatron", tmp_path, "resume", how)
    check_resumed(tmp_path, saved=2, last=4)
    path = tmp_path / "iter_0000002"
    check_ours(path)
    check_cleaned(tmp_path, path)
    assert {"common.pt", "metadata.json"} <= {one.name for one in path.iterdir()}
