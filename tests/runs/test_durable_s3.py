"""A run on S3: its steps, lease and retention, and uploads over a network with faults; on moto and on a real server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointError, CheckpointManager, Keep, RunInUseError, StorageError, tools
from dcp_nvcomp.runs import list_run, pin_step, prune_run
from tests.distributed.launch import RankPool
from tests.faults.proxy import FaultProxy
from tests.runs import jobs

pytestmark = [pytest.mark.s3]

Store = tuple[str, dict[str, Any]]


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.randn(300_000, generator=torch.Generator().manual_seed(step)), "step": step}


def _loaded(manager: CheckpointManager) -> int:
    """Restore, check the values, and return the step."""
    state = _state(12345)
    restored = manager.restore(state)
    assert restored is not None and state["step"] == restored.step
    assert torch.equal(state["w"], _state(restored.step)["w"])
    return restored.step


def _steps(store: Store) -> list[int | None]:
    return [step.step for step in list_run(store[0], storage_options=store[1]).steps]


def test_a_run_on_s3(any_s3_store: Store) -> None:
    url, options = any_s3_store
    with CheckpointManager(url, every=1, keep=Keep(last=2), run_id="job", **options) as manager:
        with pytest.raises(RunInUseError, match="job 'job'"):
            CheckpointManager(url, run_id="other", **options)
        for step in (1, 2):
            manager.save(step, _state(step), metrics={"loss": 1 / step})
        manager.wait()
        pin_step(url, 1, storage_options=options)
        for step in (3, 4):
            manager.save(step, _state(step), metrics={"loss": 1 / step})
    assert _steps(any_s3_store) == [1, 3, 4]
    assert prune_run(url, Keep(last=1), storage_options=options).kept == {1: ("pinned",), 4: ("last 1",)}
    with CheckpointManager(url, run_id="other", **options) as manager:
        assert _loaded(manager) == 4


@pytest.fixture
def proxied(any_s3_store: Store) -> Iterator[tuple[FaultProxy, Store, Store]]:
    url, options = any_s3_store
    with FaultProxy(options["endpoint_url"], seed=3) as proxy:
        yield proxy, (url, {**options, "endpoint_url": proxy.url}), any_s3_store


@pytest.mark.ci
def test_over_a_bad_network_steps_are_saved_pruned_and_restored(
    proxied: tuple[FaultProxy, Store, Store], tmp_path: Path
) -> None:
    proxy, (url, options), direct = proxied
    proxy.rates = {"unavailable": 0.1, "reset": 0.05, "lost": 0.05, "flipped": 0.02}
    tiers: dict[str, Any] = {"fast": tmp_path, "fast_every": 1, "fast_keep": 1}
    with CheckpointManager(url, every=2, keep=Keep(last=2), run_id="job", **tiers, **options) as manager:
        for step in range(1, 9):
            manager.save(step, _state(step))
        manager.wait()
    assert _steps(direct) == [6, 8]
    for step in (6, 8):
        assert tools.verify(f"{url}/step-{step}", full=True, storage_options=direct[1]).is_sound
    shutil.rmtree(tmp_path)
    with CheckpointManager(url, run_id="job", **options) as manager:
        assert _loaded(manager) == 8
    assert proxy.counts["unavailable"] > 5


@pytest.mark.ci
def test_an_upload_that_fails_is_made_by_the_next_job(proxied: tuple[FaultProxy, Store, Store], tmp_path: Path) -> None:
    proxy, (url, options), direct = proxied
    tiers: dict[str, Any] = {"fast": tmp_path, "fast_every": 1, "storage_deadline_seconds": 5}
    with CheckpointManager(url, every=1, run_id="job", **tiers, **options) as manager:
        manager.save(1, _state(1)).saved.result(60)
        proxy.rates = {"unavailable": 1.0}
        with pytest.raises(StorageError):
            manager.save(2, _state(2)).saved.result(60)
        proxy.rates = {}
        with pytest.raises(CheckpointError):
            manager.save(3, _state(3))
    assert _steps(direct) == [1]
    with CheckpointManager(url, every=1, run_id="job", **tiers, **options) as manager:
        assert _loaded(manager) == 2
        manager.wait()
    assert _steps(direct) == [1, 2]
    assert tools.verify(f"{url}/step-2", full=True, storage_options=direct[1]).is_sound


def test_nodes_over_s3(ranks: RankPool, any_s3_store: Store, tmp_path: Path) -> None:
    url, options = any_s3_store
    tiers = {"every": 20, "fast_every": 10, "copies": 1}
    ranks.run(jobs.save_steps, tmp_path, [10, 20, 30], root=url, **tiers, **options)
    assert _steps(any_s3_store) == [20]
    shutil.rmtree(jobs.fast_of(tmp_path, 1))
    results = ranks.run(jobs.restore, tmp_path, 30, root=url, **tiers, **options)
    assert sum(result.get("durable", 0) for result in results) == 0
    for node in (0, 1):
        shutil.rmtree(jobs.fast_of(tmp_path, node))
    ranks.run(jobs.restore, tmp_path, 20, root=url, world_size=2, per_node=1, **tiers, **options)
