"""HSDP as users run it: trained, a node lost, resumed from the other replica, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.launch import RankPool
from tests.runs.state import jobs


def _train(place: Path, steps: int, stop_at: int | None = None) -> dict[str, Any]:
    node = dist.get_rank() // 2
    return jobs.train(
        place / "run",
        steps,
        stop_at=stop_at,
        replicas=2,
        every=1000,
        fast=place / f"node-{node}",
        fast_every=3,
        copies="replicas",
        node=f"node {node}",
    )


@pytest.mark.ci
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_resuming_is_bit_identical_to_not_stopping(ranks: RankPool, tmp_path: Path, lost: int | None) -> None:
    """Generators and data loaders of the ranks of the lost node included."""
    whole = ranks.run(_train, tmp_path / "whole", 12)
    first = ranks.run(_train, tmp_path / "parts", 12, 6)
    if lost is not None:
        shutil.rmtree(tmp_path / "parts" / f"node-{lost}")
    second = ranks.run(_train, tmp_path / "parts", 12)
    for rank in range(4):
        assert first[rank]["losses"] | second[rank]["losses"] == whole[rank]["losses"]
        assert set(second[rank]["losses"]) == set(range(7, 13))
        assert second[rank]["parameters"] == whole[rank]["parameters"]
    assert not list((tmp_path / "parts" / "run").glob("step-*")), "nothing of it came from there"
