"""Kept plans and plain calls on several ranks: all use the same plan, or all plan anew; all learn of a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from dcp_nvcomp import NvcompReader, NvcompWriter, SaveStats, async_save, errors, load, save
from dcp_nvcomp.saving.plans.planner import KeepingPlanner
from dcp_nvcomp.saving.process_state import forget_all
from tests.checkpoints import assert_loads
from tests.conformance.sabotage import Sabotage
from tests.saving.plans.test_kept import places, planning
from tests.states import State, assert_same, blank

from .jobs import sharded
from .launch import RankPool


def _full(seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(8, 40, generator=generator).to(dtype) for number in range(3)}


def _described(path: Path) -> tuple[Any, ...]:
    """What `.metadata` says, without the ids of the save."""
    metadata = NvcompReader(path).read_metadata()
    paths = {fqn: metadata.planner_data[fqn] for fqn in metadata.state_dict_metadata}
    return metadata.state_dict_metadata, paths, places(metadata)


def _in_many_ways(path: Path) -> list[tuple[str, int]]:
    """Save states one after the other, each beside `dcp.save`; return how often a rank planned for it."""
    forget_all()
    rank, half = dist.get_rank(), torch.bfloat16
    cases = {
        "first": sharded(_full(1)),
        "again": sharded(_full(2)),
        "bf16": sharded(_full(3, half)),
        "back": sharded(_full(4)),
        "columns": sharded(_full(5), Shard(1)),
        "replicas": sharded(_full(6), Replicate()),
        "columns again": sharded(_full(7), Shard(1)),
        "one rank has more": {**sharded(_full(8)), **({"own": torch.ones(3)} if rank == 1 else {})},
        "once more": {**sharded(_full(9)), **({"own": torch.ones(3)} if rank == 1 else {})},
        "objects": {"step": {"of": 1}, "text": "xx"},
    }
    planned = []
    for name, state in cases.items():
        if name == "once more" and rank == 2:
            forget_all()
        with planning() as plans:
            save(state, path / name)
        planned.append((name, len(plans)))
        dcp.save(state, storage_writer=NvcompWriter(path / "dcp"))
        if rank == 0:
            mine, theirs = _described(path / name), _described(path / "dcp")
            assert mine == theirs, name
        dist.barrier()
    return planned


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_use_the_same_plan_or_all_plan_anew(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    told = ranks.run(_in_many_ways, tmp_path, world_size=world_size)
    kept = {"again", "back", "columns again", "once more"} - ({"once more"} if world_size > 2 else set())
    for rank in told:
        assert {name for name, count in rank if not count} == kept
    for name, seed in (("first", 1), ("again", 2), ("back", 4), ("columns", 5), ("replicas", 6), ("columns again", 7)):
        assert_loads(tmp_path / name, _full(seed))
    assert_loads(tmp_path / "bf16", _full(3, torch.bfloat16))


def _in_two_groups(path: Path) -> int:
    forget_all()
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2])]
    mine = groups[rank // 2]
    with planning() as plans:
        for number in range(2):
            state = {f"of{rank}": torch.full((4,), number * 10.0 + rank)}
            save(state, path / f"pair-{rank // 2}-{number}", process_group=mine)
            save(state, path / f"all-{number}")
            if rank in (0, 2):
                save(state, path / f"even-{number}", process_group=groups[2])
            async_save(state, path / f"async-{number}").upload_completion.result(100)
    return len(plans)


def test_each_group_has_its_plans(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(_in_two_groups, tmp_path, world_size=4)
    assert told == [3, 2, 3, 2], "async_save uses the plan of all ranks"
    for number in range(2):
        full = {f"of{rank}": torch.full((4,), number * 10.0 + rank) for rank in range(4)}
        for kind in ("all", "async"):
            assert_loads(tmp_path / f"{kind}-{number}", full)
        assert_loads(tmp_path / f"even-{number}", {key: full[key] for key in ("of0", "of2")})
        assert_loads(tmp_path / f"pair-1-{number}", {key: full[key] for key in ("of2", "of3")})


def _fails_at_finish(path: Path, failing: int) -> None:
    """One rank fails after the others have kept the plan."""
    forget_all()
    finish, rank = KeepingPlanner.finish_plan, dist.get_rank()

    def fails(planner: KeepingPlanner, plan: SavePlan) -> SavePlan:
        raise Sabotage("on purpose")

    save(sharded(_full(1)), path)
    if rank == failing:
        KeepingPlanner.finish_plan = fails  # type: ignore[method-assign]
    try:
        with pytest.raises(errors.RankFailedError, match="on purpose") as caught:
            save(sharded(_full(2, torch.bfloat16)), path)
        assert sorted(caught.value.failures) == [failing]
    finally:
        KeepingPlanner.finish_plan = finish  # type: ignore[method-assign]
    save(sharded(_full(3)), path / "fp32")
    with planning() as plans:
        save(sharded(_full(4, torch.bfloat16)), path / "bf16")
    assert len(plans) == 1, "what one rank did not keep, none uses"
    with planning() as plans:
        save(sharded(_full(5, torch.bfloat16)), path / "again")
    assert len(plans) == 0


@pytest.mark.ci
@pytest.mark.parametrize("failing", [0, 1])
def test_a_plan_that_one_rank_did_not_keep_is_made_anew(ranks: RankPool, tmp_path: Path, failing: int) -> None:
    ranks.run(_fails_at_finish, tmp_path, failing, world_size=2)
    assert_loads(tmp_path, _full(1))
    assert_loads(tmp_path / "fp32", _full(3))
    assert_loads(tmp_path / "bf16", _full(4, torch.bfloat16))
    assert_loads(tmp_path / "again", _full(5, torch.bfloat16))


class _Stateful:
    def __init__(self, rank: int, *, fails: bool = False) -> None:
        self.loaded: State = {}
        self._rank, self._fails = rank, fails

    def state_dict(self) -> State:
        if self._fails:
            raise Sabotage("no state today")
        return {"w": torch.full((3,), 5.0), f"of {self._rank}": torch.full((2,), float(self._rank))}

    def load_state_dict(self, state: State) -> None:
        self.loaded = state


def _stateful_fails(path: Path, failing: int) -> tuple[list[str], Any]:
    rank, said = dist.get_rank(), []
    spoilt = {"model": _Stateful(rank, fails=rank == failing)}
    good = _Stateful(rank)
    save({"model": good}, path)
    for call in (
        lambda: save(spoilt, path),
        lambda: async_save(spoilt, path).upload_completion.result(100),
        lambda: async_save(spoilt, path, wait="nothing").upload_completion.result(100),
        lambda: load(spoilt, path),
    ):
        with pytest.raises(errors.CheckpointError, match="no state today") as caught:
            call()
        said.append(str(caught.value))
    load({"model": good}, path)
    async_save({"model": good}, path).upload_completion.result(100)
    return said, good.loaded


@pytest.mark.parametrize("failing", [0, 1])
def test_a_value_without_a_state_fails_all_ranks(ranks: RankPool, tmp_path: Path, failing: int) -> None:
    for said, loaded in ranks.run(_stateful_fails, tmp_path, failing, world_size=2):
        words = "state_dict() raised Sabotage: no state today"
        assert set(said) == {
            f"{words} (key 'model')",
            f"{words} (file '{tmp_path}', key 'model')",
        }  # a load has the path
        assert_same(loaded["w"], torch.full((3,), 5.0))


def _is_refused(path: Path) -> list[str]:
    good: State = {"w": torch.ones(2)}
    bad: Any = {**good, 3: 1} if dist.get_rank() == 1 else good
    save(good, path)
    said = []
    for call in (
        lambda: save(bad, path),
        lambda: async_save(bad, path).upload_completion.result(100),
        lambda: load(bad, path),
    ):
        with pytest.raises(errors.ConfigurationError) as caught:
            call()
        said.append(str(caught.value))
    save(good, path)
    load(good, path)
    return said


def test_what_is_no_state_dict_on_one_rank_is_refused_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(_is_refused, tmp_path, world_size=2):
        words = "The keys of a state dict are text, and 3 is not."
        assert set(said) == {words, f"{words} (file '{tmp_path}')"}


def _loads_sharded(path: Path, placement: Placement) -> None:
    full = {**_full(1), "plain": torch.arange(5), "step": 7}
    state = {**sharded(_full(1), placement), "plain": torch.arange(5), "step": 7}
    save(state, path)
    into = {**sharded(blank(_full(1)), placement), "plain": torch.zeros(5, dtype=torch.int64), "step": 0}
    load(into, path)
    for name, value in full.items():
        found = into[name]
        assert_same(found.full_tensor() if name.startswith("w") else found, value, name)


@pytest.mark.ci
@pytest.mark.parametrize("placement", [Shard(1), Replicate()], ids=str)
def test_load_fills_shards(ranks: RankPool, tmp_path: Path, placement: Placement) -> None:
    ranks.run(_loads_sharded, tmp_path, placement, world_size=3)


def _load_fails(path: Path) -> str:
    rank = dist.get_rank()
    shape = (3,) if rank == 0 else (4,)
    save({"w": torch.ones(3)}, path)
    with pytest.raises(errors.ShapeMismatchError) as caught:
        load({"w": torch.zeros(shape)}, path)
    return str(caught.value)


def test_a_load_that_fails_on_one_rank_fails_on_all(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(_load_fails, tmp_path, world_size=2)
    assert first == second == f"The destination has shape (4,), but (3,) was saved. (file '{tmp_path}', key 'w')"


def _metadata_of_all_ranks(path: Path) -> Metadata:
    return async_save(sharded(_full(1)), path).upload_completion.result()


def test_the_coordinator_returns_the_metadata_of_all(ranks: RankPool, tmp_path: Path) -> None:
    coordinator, other = ranks.run(_metadata_of_all_ranks, tmp_path, world_size=2)
    item = coordinator.state_dict_metadata["w0"]
    assert isinstance(item, TensorStorageMetadata) and len(item.chunks) == 2
    assert len(coordinator.storage_data) == 6
    assert other.storage_meta == coordinator.storage_meta and SaveStats.of(other) == SaveStats.of(coordinator)


def _submesh(path: Path) -> None:
    """Two ranks of four hold the tensor."""
    rank = dist.get_rank()
    mesh = [DeviceMesh("cpu", half) for half in ([0, 1], [2, 3])][rank // 2]
    for seed in (1, 2):
        value = distribute_tensor(_full(seed)["w0"], mesh, [Shard(0)], src_data_rank=None)
        save({f"of{rank // 2}": value}, path / str(seed))


def test_tensors_of_some_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_submesh, tmp_path, world_size=4)
    for seed in (1, 2):
        assert_loads(tmp_path / str(seed), {name: _full(seed)["w0"] for name in ("of0", "of1")})
