"""Fixtures of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launch import ranks, single_rank

__all__ = ["process_group", "ranks", "single_rank"]


@pytest.fixture
def process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A gloo process group whose only rank is this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting-point'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
