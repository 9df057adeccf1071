"""A failure on one rank is a failure on every rank, publishes nothing, and leaves the process group usable."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import errors
from tests.checkpoints import file_names, flip
from tests.conformance.plugins import OURS, Plugin, on_every_plugin, quiet_stock
from tests.conformance.sabotage import LOAD_STEPS, SAVE_STEPS, FailingLoadPlanner, FailingSavePlanner, Sabotage
from tests.conformance.values import trained
from tests.distributed.jobs import assert_alive, sharded
from tests.distributed.launch import RankPool, logged
from tests.states import assert_same_bits, opposite_of

pytestmark = quiet_stock

TENSOR_COUNT = 5


def _values(seed: str) -> dict[str, torch.Tensor]:
    return {f"w{number}": trained(torch.float32, (201, 120 + number), seed) for number in range(TENSOR_COUNT)}


def _state(seed: str, *, blank: bool = False) -> dict[str, Any]:
    values = {name: opposite_of(value) if blank else value for name, value in _values(seed).items()}
    return {**sharded(values), "seed": "" if blank else seed}


def _load(plugin: Plugin, path: Path, seed: str) -> None:
    state = _state(seed, blank=True)
    dcp.load(state, storage_reader=plugin.reader(path))
    expected = _state(seed)
    assert state.pop("seed") == expected.pop("seed")
    for name, value in expected.items():
        assert_same_bits(state[name].to_local(), value.to_local(), name)


def _failures(function: Any) -> dict[int, BaseException]:
    """Return what each rank raised, as DCP reports it to this rank."""
    try:
        function()
    except dcp.CheckpointException as error:
        assert_alive()
        return {rank: cause for rank, (cause, _) in error.failures.items()}
    raise AssertionError(f"rank {dist.get_rank()} heard of no failure")


def _fail_save(plugin: Plugin, path: Path, step: str, failing_rank: int, first: bool) -> None:
    writer = plugin.writer(path)
    if not first:
        dcp.save(_state("one"), storage_writer=writer)
    planner = FailingSavePlanner(step, rank=failing_rank)
    failures = _failures(lambda: dcp.save(_state("two"), storage_writer=writer, planner=planner))
    assert failures.keys() == {failing_rank} and isinstance(failures[failing_rank], Sabotage), failures
    dist.barrier()
    if first:
        assert ".metadata" not in file_names(path)
    else:
        _load(plugin, path, "one")
    if plugin == OURS:
        # A process group that could be used after the failure is one that saves, with the same writers.
        dcp.save(_state("three"), storage_writer=writer)
        _load(plugin, path, "three")


# Rank 0 alone makes the global plan.
FAILING = [(step, rank) for step in SAVE_STEPS for rank in (0, 1) if (step, rank) != ("create_global_plan", 1)]


@pytest.mark.ci
@on_every_plugin
@pytest.mark.parametrize(("step", "failing_rank"), FAILING)
def test_failed_save_raises_on_every_rank(
    ranks: RankPool, tmp_path: Path, plugin: Plugin, step: str, failing_rank: int
) -> None:
    ranks.run(_fail_save, plugin, tmp_path, step, failing_rank, True, world_size=2)


@pytest.mark.ci
@pytest.mark.parametrize(("step", "failing_rank"), FAILING)
def test_failed_save_harms_no_earlier_checkpoint(ranks: RankPool, tmp_path: Path, step: str, failing_rank: int) -> None:
    ranks.run(_fail_save, OURS, tmp_path, step, failing_rank, False, world_size=2)


def _fail_and_save_again(path: Path, failing_rank: int) -> tuple[set[str], set[str], set[str], Any]:
    writer = OURS.writer(path)
    dcp.save(_state("one"), storage_writer=writer)
    dist.barrier()
    first = file_names(path)
    dist.barrier()
    planner = FailingSavePlanner("resolve_data", rank=failing_rank)
    _failures(lambda: dcp.save(_state("two"), storage_writer=writer, planner=planner))
    dist.barrier()
    after_failure = file_names(path)
    dist.barrier()
    dcp.save(_state("three"), storage_writer=writer)
    dist.barrier()
    return first, after_failure, file_names(path), OURS.reader(path).read_metadata()


@pytest.mark.parametrize("failing_rank", [0, 3])
def test_leftovers_of_a_failed_save_go(ranks: RankPool, tmp_path: Path, failing_rank: int) -> None:
    """The failing rank removes its files at once, the ranks that had finished at their next save."""
    first, after_failure, last, metadata = ranks.run(_fail_and_save_again, tmp_path, failing_rank)[0]
    leftovers = after_failure - first
    assert not [name for name in leftovers if name.startswith(f"__{failing_rank}_")], leftovers
    assert not leftovers & last
    referenced = {value[0][0] for value in metadata.storage_data.values()}
    assert len(referenced) == 4 and referenced <= last


def _fail_load(plugin: Plugin, path: Path, step: str, failing_rank: int) -> None:
    dcp.save(_state("one"), storage_writer=plugin.writer(path))
    reader = plugin.reader(path)
    planner = FailingLoadPlanner(step, rank=failing_rank, survivors=1)
    failures = _failures(lambda: dcp.load(_state("one", blank=True), storage_reader=reader, planner=planner))
    assert failures.keys() == {failing_rank} and isinstance(failures[failing_rank], Sabotage), failures
    _load(plugin, path, "one")


@pytest.mark.ci
@on_every_plugin
@pytest.mark.parametrize(
    ("step", "failing_rank"),
    [(step, rank) for step in LOAD_STEPS for rank in (0, 1) if (step, rank) != ("create_global_plan", 1)],
)
def test_failed_load_raises_on_every_rank(
    ranks: RankPool, tmp_path: Path, plugin: Plugin, step: str, failing_rank: int
) -> None:
    ranks.run(_fail_load, plugin, tmp_path, step, failing_rank, world_size=2)


def _load_corrupt(path: Path) -> dict[int, BaseException]:
    return _failures(lambda: dcp.load(_state("one", blank=True), storage_reader=OURS.reader(path)))


def _save(plugin: Plugin, path: Path) -> None:
    dcp.save(_state("one"), storage_writer=plugin.writer(path))


def test_damage_that_one_rank_meets_is_told_to_all(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save, OURS, tmp_path, world_size=3)
    (data_file,) = tmp_path.glob("__2_*.distcp")
    flip(data_file, data_file.stat().st_size // 3, 0x10)
    for failures in ranks.run(_load_corrupt, tmp_path, world_size=3):
        assert failures.keys() == {2}
        error = failures[2]
        assert isinstance(error, errors.CorruptDataError)
        assert error.path is not None and error.path.endswith(data_file.name)
        assert error.fqn in _values("one") and error.byte_range is not None


def _save_where_one_rank_can_not_write(path: Path) -> dict[int, BaseException]:
    """Only rank 1's path leads through a file; as when one node has not mounted the storage."""
    mine = path / "file" / "c" if dist.get_rank() == 1 else path / "c"
    return _failures(lambda: dcp.save(_state("one"), storage_writer=OURS.writer(mine)))


def test_storage_error_of_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for failures in ranks.run(_save_where_one_rank_can_not_write, tmp_path, world_size=2):
        assert failures.keys() == {1} and isinstance(failures[1], errors.StorageError)
        assert failures[1].errno is not None and failures[1].path is not None
    assert ".metadata" not in file_names(tmp_path / "c")


def _save_missing_checkpoint(path: Path) -> dict[int, BaseException]:
    return _failures(functools.partial(dcp.load, {"seed": None}, storage_reader=OURS.reader(path)))


def test_missing_checkpoint_is_missing_for_all(ranks: RankPool, tmp_path: Path) -> None:
    for failures in ranks.run(_save_missing_checkpoint, tmp_path / "nothing", world_size=2):
        assert failures.keys() == {0, 1}
        for error in failures.values():
            assert isinstance(error, errors.CheckpointNotFoundError) and error.path == str(tmp_path / "nothing")


def _save_and_listen(path: Path) -> tuple[list[str], int, Any]:
    told: list[Any] = []
    with logged(logging.INFO) as lines:
        writer = OURS.writer(path, on_save=told.append, progress=True)
        dcp.save(sharded({"w": trained(torch.float32, (400, 300))}), storage_writer=writer)
    return lines, len(told), writer.last_save


def test_rank_zero_tells_of_the_whole_save(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_save_and_listen, tmp_path, world_size=3)
    assert [len(lines) for lines, _, _ in results] == [1, 0, 0]
    assert results[0][1] == 1
    stats = results[0][2]
    assert stats.uncompressed_nbytes == 400 * 300 * 4
    assert set(stats.files) == {name for name in file_names(tmp_path) if name.endswith(".distcp")}
    assert stats.by_dtype.keys() in ({"float32"}, {"torch.float32"})
