"""Replicas as each other's copies: four ranks on two nodes, each node a replica."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_nvcomp import CheckpointError, ConfigurationError, tools
from dcp_nvcomp.runs import ReplicasDiffer
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import damage
from tests.conformance.sabotage import Sabotage
from tests.distributed.launch import RankPool
from tests.runs import jobs

TIERS: dict[str, Any] = {"every": 20, "fast_every": 10, "copies": "replicas"}
SMALL = 20


def state_of(step: int) -> dict[str, Any]:
    """Return the state after a step: sharded within a replica, replicated, and what each rank has for itself."""
    count, rank = dist.get_world_size(), dist.get_rank()
    dims = (2, count // 2) if count > 2 else (1, count)
    mesh, placements = init_device_mesh("cpu", dims), [Replicate(), Shard(0)]

    def sharded(seed: int, rows: int) -> DTensor:
        full = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
        return distribute_tensor(full, mesh, placements, src_data_rank=None)

    return {
        "model": {"w": sharded(step, 2048)} | {f"small.{at}": sharded(step + at, 4) for at in range(SMALL)},
        "bias": torch.full((7,), float(step)),
        "step": step,
        "ranks": {str(rank): {"rng": torch.full((5,), step + rank / 10), "seen": [step, rank]}},
    }


def wanted(step: int) -> dict[str, Any]:
    """Return what to load into."""
    state = state_of(-1)
    state["ranks"][str(dist.get_rank())]["seen"] = ()
    return state


def assert_state_of(step: int, state: dict[str, Any]) -> None:
    expected, rank = state_of(step), str(dist.get_rank())
    for name, value in expected["model"].items():
        assert torch.equal(state["model"][name].to_local(), value.to_local()), name
    assert torch.equal(state["bias"], expected["bias"]) and state["step"] == step
    own = state["ranks"][rank]
    assert torch.equal(own["rng"], expected["ranks"][rank]["rng"]) and own["seen"] == [step, int(rank)]


def save_steps(place: Path, steps: list[int], **options: Any) -> dict[str, Any]:
    return jobs.save_steps(place, steps, state_of=state_of, **{**TIERS, **options})


def restore(place: Path, step: int, **options: Any) -> dict[str, Any]:
    """Restore, check, and return where files came from and which of the durable tier were read."""
    state = wanted(step)
    with jobs.durable_reads(place) as read, jobs.manager_of(place, **{**TIERS, **options}) as manager:
        restored = manager.restore(state)
        assert restored is not None and restored.step == step, restored
        assert_state_of(step, state)
        manager.wait()
        data = [file for file in read if file.endswith(".distcp")]
        return {**restored.files, "read": data, "damaged": restored.damaged, **jobs.reported(manager)}


def fast_step(place: Path, node: int, step: int) -> Path:
    return jobs.fast_of(place, node) / f"step-{step}"


def test_each_replica_saves_all_and_nothing_is_sent(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(save_steps, tmp_path, [10, 20, 30]):
        assert told["tiers"] == {10: {"fast", "copies"}, 20: {"fast", "copies", "durable"}, 30: {"fast", "copies"}}
        assert told["copied"] == 0 and told["differing"] == ()
    for node in (0, 1):
        tools.verify(fast_step(tmp_path, node, 30), full=True)
        keys = tools.verify(fast_step(tmp_path, node, 20), full=True)
        assert keys is not None
        assert sorted(path.name for path in jobs.fast_of(tmp_path, node).glob("step-*")) == ["step-20", "step-30"]


def test_one_replica_is_uploaded_once(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(save_steps, tmp_path, [20])
    durable = tmp_path / "run" / "step-20"
    tools.verify(durable, full=True)
    assert sum(one["uploaded"] for one in told) == sum(file.stat().st_size for file in durable.glob("*.distcp"))
    sources = [
        all((fast_step(tmp_path, node, 20) / file.name).exists() for file in durable.glob("*.distcp"))
        for node in (0, 1)
    ]
    assert sorted(sources) == [False, True]


@pytest.mark.ci
@pytest.mark.parametrize(("lost", "step"), [(0, 30), (1, 20)])
def test_a_lost_node_is_restored_from_the_other_replica(ranks: RankPool, tmp_path: Path, lost: int, step: int) -> None:
    ranks.run(save_steps, tmp_path, list(range(10, step + 1, 10)))
    shutil.rmtree(jobs.fast_of(tmp_path, lost))
    told = ranks.run(restore, tmp_path, step)
    assert all(one["read"] == [] and not one.get("durable") for one in told)
    assert [bool(one.get("peer")) for one in told] == [rank // 2 == lost for rank in range(4)]
    assert [one["uploaded"] for one in told] == [0] * 4
    for one in ranks.run(save_steps, tmp_path, [step + 10]):
        assert "copies" in one["tiers"][step + 10]
    ranks.run(restore, tmp_path, step + 10)


@pytest.mark.ci
def test_a_damaged_file_is_replaced_by_the_other_replicas(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, tmp_path, [10])
    damage(fast_step(tmp_path, 1, 10))
    told = ranks.run(restore, tmp_path, 10)
    assert any(one.get("peer") for one in told) and all(one["damaged"] == () for one in told)


@pytest.mark.ci
def test_a_replica_that_did_not_get_so_far_does_not_count(ranks: RankPool, tmp_path: Path) -> None:
    """As if its node had been killed before it published."""
    ranks.run(save_steps, tmp_path, [10, 30])
    (fast_step(tmp_path, 1, 30) / ".metadata").unlink()
    assert [bool(one.get("peer")) for one in ranks.run(restore, tmp_path, 30)] == [False, False, True, True]
    next(fast_step(tmp_path, 0, 30).glob("*.distcp")).unlink()
    for file in fast_step(tmp_path, 1, 30).glob("*.distcp"):
        file.unlink()
    ranks.run(restore, tmp_path, 10)


def test_on_fewer_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """One node is left, of two ranks that hold the state once."""
    ranks.run(save_steps, tmp_path, [10, 20, 30])
    shutil.rmtree(jobs.fast_of(tmp_path, 1))
    for told in ranks.run(restore, tmp_path, 30, world_size=2):
        assert told["read"] == [] and not told.get("peer")


def _saves_with(place: Path, spoil: int, name: str) -> tuple[list[ReplicasDiffer], dict[str, Any]]:
    events: list[Any] = []
    with jobs.manager_of(place, **TIERS, on_event=events.append) as manager:
        for step in (10, 30):
            state = state_of(step)
            if step == 10 and dist.get_rank() == spoil:
                (state["bias"] if name == "bias" else state["model"][name].to_local()).view(-1)[0] += 1
            manager.save(step, state)
        manager.wait()
        return [event for event in events if isinstance(event, ReplicasDiffer)], jobs.reported(manager)


@pytest.mark.ci
@pytest.mark.parametrize(("rank", "name"), [(1, "w"), (2, "small.3")])
def test_replicas_that_differ_are_told_of(ranks: RankPool, tmp_path: Path, rank: int, name: str) -> None:
    for events, told in ranks.run(_saves_with, tmp_path, rank, name):
        (event,) = events
        assert event.step == 10 and told["differing"] == (10,)
        if name == "w":
            assert event.fqns == ("model.w",) and "replicas differ in model.w:" in str(event)
        else:  # it shares a block with others
            assert "model.small.3" in event.fqns and "model.w" not in event.fqns and " more: " in str(event)
        assert told["tiers"] == {10: {"fast"}, 30: {"fast", "copies"}}


def _saves_objects(place: Path) -> tuple[list[ReplicasDiffer], dict[str, Any]]:
    node, events = dist.get_rank() // 2, list[Any]()
    with jobs.manager_of(place, **TIERS, on_event=events.append) as manager:
        manager.save(10, {**state_of(10), "host": "a" * (1 + 300 * node), "seconds": 0.5 + node})
        manager.wait()
        return [event for event in events if isinstance(event, ReplicasDiffer)], jobs.reported(manager)


@pytest.mark.ci
def test_objects_that_are_other_ones_on_each_node_are_not_compared(ranks: RankPool, tmp_path: Path) -> None:
    """The host's name, a time: pickles of another length, and of the same."""
    for events, told in ranks.run(_saves_objects, tmp_path):
        assert events == [] and told["differing"] == () and told["tiers"] == {10: {"fast", "copies"}}
    assert all((fast_step(tmp_path, node, 10) / ".equal").exists() for node in (0, 1))


def _upload_fails(place: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        create = PosixFilesystem.create_directory

        def fails(filesystem: PosixFilesystem) -> None:
            if f"{place}/run/step-" in filesystem.path:
                raise OSError(5, "on purpose")
            create(filesystem)

        patch.setattr(PosixFilesystem, "create_directory", fails)
        with jobs.manager_of(place, **TIERS) as manager:
            manager.save(20, state_of(20))
            with pytest.raises(CheckpointError) as caught:
                manager.wait()
    return str(caught.value)


def _one_replica_fails(place: Path, failing: int) -> str:
    with jobs.manager_of(place, **TIERS) as manager:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == failing:

                def fails(*arguments: Any) -> Any:
                    raise Sabotage("on purpose")

                patch.setattr(PosixFilesystem, "open_output", fails)
            saving = manager.save(10, state_of(10))
            error = saving.saved.exception(100)
        with pytest.raises(CheckpointError):
            manager.wait()
        manager.save(30, state_of(30)).saved.result(100)
    return str(error)


@pytest.mark.ci
@pytest.mark.parametrize("failing", [0, 3])
def test_a_replica_that_fails_fails_the_step_on_all_ranks(ranks: RankPool, tmp_path: Path, failing: int) -> None:
    assert all("on purpose" in text for text in ranks.run(_one_replica_fails, tmp_path, failing))
    ranks.run(restore, tmp_path, 30)


def test_without_a_process_group_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs a process group"):
        jobs.manager_of(tmp_path, **TIERS)


def _changes_shape(place: Path) -> None:
    """An optimizer has no state before its first step: what there is to save changes, and with it what is unique."""
    with jobs.manager_of(place, **TIERS) as manager:
        first = state_of(10)
        del first["ranks"], first["model"]["small.0"]
        manager.save(10, first).saved.result(100)
        manager.save(30, state_of(30)).saved.result(100)


@pytest.mark.ci
def test_a_state_that_grows(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_changes_shape, tmp_path)
    shutil.rmtree(jobs.fast_of(tmp_path, 0))
    ranks.run(restore, tmp_path, 30)
