"""async_save on several ranks: its collectives never meet those of training, and all ranks learn of a failure."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.staging import staged_by
from dcp_nvcomp import AsyncSave, NvcompWriter, async_save, errors
from tests.checkpoints import assert_loads, file_names
from tests.conformance.sabotage import FailingSavePlanner, Sabotage
from tests.states import State

from .jobs import assert_alive, sharded
from .launch import RankPool, end_of_child

SHAPE = (64, 500)


def _full(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(SHAPE, generator=generator) for number in range(3)}


def _sharded(seed: int) -> State:
    return sharded(_full(seed))


def _spoil(state: State) -> None:
    for value in state.values():
        assert isinstance(value, DTensor)
        value.to_local().fill_(-1)


def _ended(saving: AsyncSave) -> None:
    """Wait for a save without looking at its outcome."""
    while not saving.upload_completion.done():
        time.sleep(0.01)


def _beside_training(path: Path, wait: str) -> None:
    savings = []
    for seed in range(3):
        state = _sharded(seed)
        savings.append(async_save(state, path / str(seed), wait=wait))
        assert_alive()  # training's collectives, while those of the save are under way
        savings[-1].staging_completion.result(100)
        _spoil(state)
        for _ in range(20):
            assert_alive()
    for saving in savings:
        saving.upload_completion.result(100)


@pytest.mark.ci
@pytest.mark.parametrize("wait", ["staged", "nothing"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_saves_beside_the_collectives_of_training(ranks: RankPool, tmp_path: Path, world_size: int, wait: str) -> None:
    ranks.run(_beside_training, tmp_path, wait, world_size=world_size)
    for seed in range(3):
        assert_loads(tmp_path / str(seed), _full(seed))


def _fails_while_staging(path: Path, failing: int) -> tuple[str, str]:
    dist.get_rank()
    writer = NvcompWriter(path)
    saving = async_save(
        _sharded(1), storage_writer=writer, planner=FailingSavePlanner("resolve_data", rank=failing, survivors=0)
    )
    assert_alive()
    staging = saving.staging_completion.exception(100)
    with pytest.raises(BaseException, match="resolve_data") as caught:
        saving.upload_completion.result(100)
    assert_alive()
    async_save(_sharded(2), storage_writer=writer).upload_completion.result(100)
    return type(staging).__name__, type(caught.value).__name__


@pytest.mark.ci
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_while_staging_fails_the_save_of_all(ranks: RankPool, tmp_path: Path, failing: int) -> None:
    told = ranks.run(_fails_while_staging, tmp_path, failing, world_size=2)
    assert [staging != "NoneType" for staging, _ in told] == [rank == failing for rank in range(2)]
    assert_loads(tmp_path, _full(2))
    assert len(file_names(tmp_path)) == 4, "files of two ranks, .metadata and its copy"


class _Moody:
    """Can't be pickled while it is in a bad mood."""

    def __init__(self, *, is_well: bool) -> None:
        self.is_well = is_well

    def __reduce__(self) -> Any:
        if not self.is_well:
            raise Sabotage("on purpose")
        return _Moody, ()


def _fails_while_copying(path: Path, failing: int) -> tuple[str, str]:
    rank, told = dist.get_rank(), ("", "")
    writer = NvcompWriter(path)
    for seed, is_well in enumerate((True, rank != failing, True)):
        state = {**_sharded(seed), f"rank {rank}": _Moody(is_well=is_well)}
        with staged_by("copy"):
            saving = async_save(state, storage_writer=writer)
        assert_alive()
        _spoil({name: state[name] for name in _full(seed)})
        if seed == 1:
            staging = saving.staging_completion.exception(100)
            with pytest.raises(BaseException, match="on purpose") as caught:
                saving.upload_completion.result(100)
            told = type(staging).__name__, type(caught.value).__name__
        else:
            saving.upload_completion.result(100)
    return told


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_while_it_copies_what_a_kept_plan_says(ranks: RankPool, tmp_path: Path, failing: int) -> None:
    """It does so before DCP's first collective, on the way to which the other ranks are."""
    told = ranks.run(_fails_while_copying, tmp_path, failing, world_size=2)
    assert [staging != "NoneType" for staging, _ in told] == [rank == failing for rank in range(2)]
    assert_loads(tmp_path, _full(2))


def _nobody_looked(path: Path, who_looks: tuple[int, ...]) -> str:
    saving = async_save(_sharded(1), path, planner=FailingSavePlanner("resolve_data", survivors=0))
    _ended(saving)
    if dist.get_rank() in who_looks:
        assert saving.upload_completion.exception() is not None
    try:
        async_save(_sharded(2), path).upload_completion.result(100)
        said = ""
    except errors.EarlierSaveError as error:
        said = str(error)
    async_save(_sharded(3), path).upload_completion.result(100)
    return said


@pytest.mark.ci
@pytest.mark.parametrize("who_looks", [(), (0,), (1,), (0, 1)])
def test_an_error_that_some_rank_did_not_look_at_is_raised_on_all(
    ranks: RankPool, tmp_path: Path, who_looks: tuple[int, ...]
) -> None:
    said = ranks.run(_nobody_looked, tmp_path, who_looks, world_size=2)
    assert ["An earlier asynchronous save failed" in text for text in said] == [len(who_looks) < 2] * 2, said
    assert_loads(tmp_path, _full(3))


def _one_more_on_a_rank(path: Path) -> list[str]:
    """Rank 0 begins a save that rank 1 does not make: its next one meets another one of rank 1."""
    said = []
    for seed in (dist.get_rank(), dist.get_rank() + 1, 3, 4):
        try:
            async_save(_sharded(seed), path / str(seed)).upload_completion.result(100)
            said.append("")
        except errors.RanksDifferError as error:
            said.append(str(error))
    return said


def test_ranks_that_are_not_at_the_same_save_are_told(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(_one_more_on_a_rank, tmp_path, world_size=2):
        assert ["different values of path" in text for text in said] == [True, True, False, False], said
    assert sorted(one.name for one in tmp_path.iterdir()) == ["3", "4"]
    assert_loads(tmp_path / "4", _full(4))


def _one_looks(path: Path) -> None:
    """`wait="nothing"`: a save fails, the next one tells of it, and only one rank looks at that."""
    (path / "file").touch()
    options: dict[str, Any] = {"wait": "nothing"}
    _ended(async_save(_sharded(0), path / "file" / "no directory", **options))
    told = async_save(_sharded(1), path / "latest", **options)
    _ended(told)
    if dist.get_rank() == 0:
        assert isinstance(told.upload_completion.exception(), errors.EarlierSaveError)
    outcomes = []
    for seed in (2, 3, 4):
        saving = async_save(_sharded(seed), path / "latest", **options)
        saving.staging_completion.exception(100)
        outcomes.append(type(saving.upload_completion.exception(100)).__name__)
        dist.barrier()
        if outcomes[-1] == "NoneType":
            assert_loads(path / "latest", _full(seed))  # no mixture of two saves
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, outcomes)
    assert everyones == [outcomes] * len(everyones)
    assert outcomes[1:] == ["NoneType", "NoneType"]


def test_ranks_stay_in_step_whoever_looked_at_an_error(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_one_looks, tmp_path, world_size=2)


def _two_groups(path: Path) -> None:
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=3)) for _ in range(2)]
    number = dist.get_rank()  # in another order on the other rank
    state = {f"{number}": torch.full((1000,), float(number))}
    with pytest.raises(errors.RanksDifferError, match="did not call async_save within 3 s"):
        async_save(state, path / "same", process_group=groups[number], wait="nothing")
    assert not list(path.glob("same/.metadata"))


@pytest.mark.ci
def test_saves_of_two_groups_in_another_order_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_two_groups, tmp_path, world_size=2)


def _save_once(path: Path) -> None:
    async_save(_sharded(1), path).upload_completion.result(60)


def _fork() -> int | None:
    return end_of_child(lambda: None)


def test_a_process_forked_after_groups_were_destroyed_lives(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save_once, tmp_path, world_size=2)
    # each call has a process group of its own: that of the first one is gone by now
    assert ranks.run(_fork, world_size=2) == [7, 7]
