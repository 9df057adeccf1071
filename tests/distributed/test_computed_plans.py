"""First saves on several ranks: planned by each from what all describe, else by DCP; a failure ends all of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_nvcomp import async_save, errors, load, open_checkpoint, save
from dcp_nvcomp.saving.plans import agreement
from dcp_nvcomp.saving.plans import planner as planner_module
from dcp_nvcomp.saving.plans.shared_plan import SharedPlan
from dcp_nvcomp.saving.process_state import forget_all
from tests.checkpoints import assert_loads
from tests.conformance.sabotage import Sabotage
from tests.states import State, assert_same

from .launch import RankPool


class _Values:
    def __init__(self, values: State) -> None:
        self.values = values

    def state_dict(self) -> State:
        return self.values

    def load_state_dict(self, values: State) -> None:
        self.values = values


class _Sub(torch.Tensor):
    pass


def _states(rank: int, world: int) -> dict[str, tuple[State, bool]]:
    """States of this rank, and whether the ranks compute their plans."""
    local = OldShard(torch.ones(2, 2), ShardMetadata([2 * rank, 0], [2, 2], f"rank:{rank}/cpu"))
    own = {f"only_{rank}": torch.full((3,), float(rank)), "all": 1, rank: {"text": "x"}}
    return {
        "the same keys": ({"lr": 0.1, "b": torch.ones(3), "nested": {"list": [torch.ones(2), {}]}}, True),
        "keys of each rank": ({"s": _Values(own)}, True),
        "a tensor of one rank": ({"b": torch.ones(2)} if rank == 1 else {}, True),
        "other meshes": ({"half": _of_half(rank, world)}, True),
        "a container here, a value there": ({"of": {"x": 1} if rank == 1 else 2}, False),
        "a subclass on one rank": ({"b": torch.ones(3).as_subclass(_Sub) if rank == 1 else torch.ones(3)}, False),
        "a ShardedTensor": ({"t": init_from_local_shards([local], 2 * world, 2)}, False),
    }


def _of_half(rank: int, world: int) -> DTensor:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    return distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh["inner"], [Shard(0)], src_data_rank=None)


def _saves_them(path: Path) -> list[tuple[str, bool, int]]:
    """Save each state twice; return whether the first save was computed, and how often the second one was planned."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    mesh = init_device_mesh("cpu", (world,))
    for name, (state, _) in _states(rank, world).items():
        forget_all()
        weight = distribute_tensor(torch.arange(8.0 * world).reshape(-1, 2), mesh, [Shard(0)], src_data_rank=None)
        counts = []
        for number in range(2):
            is_told = "container" in name and number == 0  # once in a process
            with pytest.MonkeyPatch.context() as patch, pytest.warns() if is_told else _nothing():
                by_dcp: list[int] = []
                plan = DefaultSavePlanner.create_local_plan
                patch.setattr(
                    DefaultSavePlanner,
                    "create_local_plan",
                    lambda planner, plan=plan, by=by_dcp: by.append(1) or plan(planner),
                )
                save({"w": weight, **state}, path / name)
            counts.append(len(by_dcp))
        found.append((name, counts[0] == 0, counts[1]))
        if rank == 0:
            with open(path / name / ".metadata", "rb") as file:
                assert "w" in pickle.load(file).state_dict_metadata
    return found


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.ci
def test_states_are_planned_by_the_ranks_or_by_dcp(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(_saves_them, tmp_path, world_size=4)
    assert told == [told[0]] * 4
    expected = ranks.run(_expected, world_size=4)[0]
    assert {name: computed for name, computed, _ in told[0]} == expected
    for name, computed, again in told[0]:
        assert again == 0 or not computed, name
        found = open_checkpoint(tmp_path / name)["w"][:]
        assert_same(found, torch.arange(32.0).reshape(-1, 2))
    found = open_checkpoint(tmp_path / "keys of each rank")
    assert all(bool((found[f"s.only_{rank}"][:] == rank).all()) for rank in range(4))


def _expected() -> dict[str, bool]:
    return {name: computed for name, (_, computed) in _states(dist.get_rank(), dist.get_world_size()).items()}


def _sends(path: Path, most_broadcasts: int, most_nbytes: int) -> int:
    """Save what differs from rank to rank; return how often DCP planned."""
    rank, world = dist.get_rank(), dist.get_world_size()
    agreement._MOST_BROADCASTS, agreement._MOST_NBYTES = most_broadcasts, most_nbytes  # type: ignore[misc]
    forget_all()
    plans: list[int] = []
    plan = DefaultSavePlanner.create_local_plan
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DefaultSavePlanner, "create_local_plan", lambda planner: plans.append(1) or plan(planner))
            save({f"of{rank}": torch.full((4,), float(rank)), f"o{rank}": rank, "all": torch.ones(2)}, path)
    finally:
        agreement._MOST_BROADCASTS, agreement._MOST_NBYTES = 64, 64 << 20  # type: ignore[misc]
    into: State = {f"of{other}": torch.zeros(4) for other in range(world)} | {f"o{(rank + 1) % world}": None}
    load(into, path)
    assert all(bool((into[f"of{other}"] == other).all()) for other in range(world))
    assert into[f"o{(rank + 1) % world}"] == (rank + 1) % world
    return len(plans)


@pytest.mark.parametrize(("broadcasts", "nbytes", "by_dcp"), [(64, 64 << 20, 0), (1, 64 << 20, 0), (1, 0, 1)])
def test_few_variants_are_broadcast_and_too_many_left_to_dcp(
    ranks: RankPool, tmp_path: Path, broadcasts: int, nbytes: int, by_dcp: int
) -> None:
    assert ranks.run(_sends, tmp_path, broadcasts, nbytes, world_size=3) == [by_dcp] * 3


def _one_fails(path: Path, where: str, failing: int) -> list[int]:
    """Fail on one rank after all have agreed to compute their plans; return how often DCP planned."""
    rank = dist.get_rank()
    state: State = {"w": torch.ones(4), f"of{rank}": rank}
    plan, counts = DefaultSavePlanner.create_local_plan, list[int]()
    for saving in (lambda: save(state, path), lambda: async_save(state, path).upload_completion.result(60)):
        forget_all()
        with pytest.MonkeyPatch.context() as patch:
            by_dcp: list[int] = []
            patch.setattr(
                DefaultSavePlanner,
                "create_local_plan",
                lambda planner, by_dcp=by_dcp: by_dcp.append(1) or plan(planner),
            )
            if rank == failing:
                target = {
                    "unpacked": (planner_module.Part, "unpacked"),
                    "plan_all": (planner_module, "plan_all"),
                    "save_plan": (SharedPlan, "save_plan"),
                }[where]
                patch.setattr(*target, _fails)
            saving()
            saving()
        counts.append(len(by_dcp))
    return counts


def _fails(*_: Any, **__: Any) -> Any:
    raise Sabotage("no memory for it")


@pytest.mark.ci
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("where", ["unpacked", "plan_all", "save_plan"])
def test_if_a_rank_cannot_compute_its_plan_dcp_plans_on_all(
    ranks: RankPool, tmp_path: Path, where: str, failing: int
) -> None:
    assert ranks.run(_one_fails, tmp_path, where, failing, world_size=3) == [[1, 1]] * 3, "and its plan is kept"
    assert_loads(tmp_path, {"w": torch.ones(4), **{f"of{rank}": rank for rank in range(3)}})


def _becomes_a_container(path: Path) -> str:
    """An empty container on all ranks is a value on one later, and filled on the other: they were equal structures."""
    rank = dist.get_rank()
    save({"a": {}}, path)
    with pytest.raises(errors.ConfigurationError) as caught:
        save({"a": {"b": 1} if rank else 5}, path, on_difference="error")
    return str(caught.value)


def test_an_empty_container_is_part_of_the_structure(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(_becomes_a_container, tmp_path, world_size=2)
    assert first == second and "'a' on rank 0 and 'a.b' on rank 1" in first.replace(
        "'a.b' on rank 1 and 'a' on rank 0", "'a' on rank 0 and 'a.b' on rank 1"
    )


def _differs(path: Path) -> list[str]:
    """Values that are the same key's, and are not equal: found at a computed plan as at any other."""
    rank, said = dist.get_rank(), []
    for number in range(2):
        forget_all() if number == 0 else None
        state = {"step": 5 + rank, "w": torch.full((3,), float(rank)), f"own.{rank}": rank, "same": "x"}
        with pytest.raises(errors.ConfigurationError) as caught:
            save(state, path, on_difference="error")
        said.append(str(caught.value))
        with pytest.warns(RuntimeWarning) if number == 0 else _nothing():
            save(state, path)
    return said


def test_what_differs_is_told_at_computed_plans(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(_differs, tmp_path, world_size=3):
        assert said[0] == said[1]
        assert (
            "'step' (rank 0 and 1, 2)" in said[0]
            and "'w' (rank 0 and 1, 2)" in said[0]
            and "same" not in said[0].split(". Give")[0].split(":")[1]
        )
