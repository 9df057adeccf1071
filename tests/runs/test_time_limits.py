"""A rank that no longer answers: the others end within the time limit of the process group that they were given.

It is one that sleeps at the place in question: to the others that is what a machine looks like that has lost its
network. Of a process that is killed gloo tells at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointManager, NvcompReader, NvcompWriter, async_save, load, save
from dcp_nvcomp.errors import CheckpointError, RankFailedError
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.runs.background.stages import DurableStage
from dcp_nvcomp.runs.lease import Lease
from dcp_nvcomp.runs.restoring.restore import Restoring
from tests.distributed.launch import RankPool

LIMIT_SECONDS = 1.0
PATIENCE_SECONDS = 4.0


def _manager(place: Path, group: dist.ProcessGroup) -> CheckpointManager:
    rank = dist.get_rank(group)
    return CheckpointManager(
        place / "run",
        every=1,
        fast=place / f"node-{rank}",
        fast_every=1,
        node=f"node {rank}",
        preemption_signals=(),
        process_group=group,
    )


def _make(place: Path, group: dist.ProcessGroup) -> None:
    _manager(place, group).close()


def _save(place: Path, group: dist.ProcessGroup) -> None:
    with _manager(place, group) as manager:
        manager.save(1, {"w": torch.ones(3)})
        manager.wait()


def _restore(place: Path, group: dist.ProcessGroup) -> None:
    with _manager(place, group) as manager:
        manager.save(1, {"w": torch.ones(3)})
        manager.restore({"w": torch.ones(3)})


def _async_save(place: Path, group: dist.ProcessGroup) -> None:
    async_save({"w": torch.ones(3)}, place / "a", process_group=group).upload_completion.result()


def _save_once(place: Path, group: dist.ProcessGroup) -> None:
    save({"w": torch.ones(3)}, place / "a", process_group=group)


def _load(place: Path, group: dist.ProcessGroup) -> None:
    _save_once(place, group)
    load({"w": torch.ones(3)}, place / "a", process_group=group)


# What is called, and where rank 1 falls silent: an attribute of a class or module, and at which of its calls.
Does = Callable[[Path, dist.ProcessGroup], None]
SILENT: dict[str, tuple[Does, Any, str, int]] = {
    "the first group of a manager": (_make, dist, "new_group", 1),
    "the second group of a manager": (_make, dist, "new_group", 2),
    "where the ranks tell their nodes": (_make, Ranks, "gather", 1),
    "in the background of a save": (_save, DurableStage, "_send", 1),
    "in a restore": (_restore, Restoring, "_attempt", 1),
    "groups of async_save": (_async_save, dist, "new_group", 1),
    "in async_save": (_async_save, NvcompWriter, "write_data", 1),
    "in save": (_save_once, NvcompWriter, "write_data", 1),
    "in load": (_load, NvcompReader, "read_data", 1),
}


def _silent_on_one_rank(place: Path, case: str) -> float | None:
    """Return how long the call took on the rank that waits; None on the one that falls silent."""
    call, owner, name, at = SILENT[case]
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    began = time.monotonic()
    if dist.get_rank() != 1:
        with pytest.raises(CheckpointError) as caught:
            call(place, group)
        took_seconds = time.monotonic() - began
        (place / "given up").touch()
        assert isinstance(caught.value, RankFailedError), caught.value
        return took_seconds
    real, calls, world = getattr(owner, name), 0, dist.group.WORLD

    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            patience = time.monotonic() + LIMIT_SECONDS + PATIENCE_SECONDS
            while not (place / "given up").exists() and time.monotonic() < patience:
                time.sleep(0.02)
            if dist.group.WORLD is not world:
                raise RuntimeError("the rank that was silent woke up in another test")
            if name == "new_group":
                raise RuntimeError("torch waits minutes for ranks that no longer make it")
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, slow)
        try:
            call(place, group)
        except Exception:
            return None
    raise AssertionError("it came too late, and nobody noticed")


IN_EACH_RUN = ("the second group of a manager", "in the background of a save")


@pytest.mark.ci
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one in IN_EACH_RUN else pytest.mark.slow) for one in SILENT]
)
def test_a_silent_rank(ranks: RankPool, tmp_path: Path, case: str) -> None:
    took_seconds = [seconds for seconds in ranks.run(_silent_on_one_rank, tmp_path, case, world_size=2) if seconds]
    assert len(took_seconds) == 1 and took_seconds[0] < LIMIT_SECONDS + PATIENCE_SECONDS


def _watches_a_lease(place: Path) -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    take = Lease.take

    def slow(*args: Any, **kwargs: Any) -> Lease:
        time.sleep(2.5 * LIMIT_SECONDS)
        return take(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "take", slow)
        _make(place, group)


def test_a_lease_that_is_watched_for_longer_than_the_other_ranks_wait(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_watches_a_lease, tmp_path, world_size=2)
