"""A save or load that fails at any step raises, publishes nothing, and harms no earlier checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import errors
from tests.checkpoints import assert_holds, file_names
from tests.states import assert_same_bits, opposite_of

from .plugins import ORACLE, OURS, Plugin, cause_of, on_every_plugin, on_every_reader, quiet_stock
from .sabotage import LOAD_STEPS, SAVE_STEPS, FailingLoadPlanner, FailingSavePlanner, Sabotage, Unsaveable
from .values import trained

pytestmark = quiet_stock


def _four_tensors(seed: str) -> dict[str, Any]:
    tensors: dict[str, Any] = {f"w{n}": trained(torch.float32, (200, 300 + n), seed) for n in range(4)}
    return {**tensors, "seed": seed}


@on_every_plugin
@pytest.mark.parametrize("step", SAVE_STEPS)
def test_failed_save_publishes_nothing(tmp_path: Path, plugin: Plugin, step: str) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path), planner=FailingSavePlanner(step))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert ".metadata" not in file_names(tmp_path)
    assert plugin != OURS or file_names(tmp_path) == set()
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"seed": None}, storage_reader=plugin.reader(tmp_path))


@pytest.mark.parametrize(
    ("step", "thread_count", "single_file_per_rank"),
    [
        *((step, 2, True) for step in SAVE_STEPS),
        *(("resolve_data", *how) for how in [(1, True), (1, False), (3, False)]),
    ],
)
def test_failed_save_harms_nothing(tmp_path: Path, step: str, thread_count: int, single_file_per_rank: bool) -> None:
    """Stock DCP overwrites in place and can't promise this."""
    writer = OURS.writer(tmp_path, thread_count=thread_count, single_file_per_rank=single_file_per_rank)
    dcp.save(_four_tensors("one"), storage_writer=writer)
    before = {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_four_tensors("two"), storage_writer=writer, planner=FailingSavePlanner(step))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)} == before
    assert_holds(OURS.reader(tmp_path), _four_tensors("one"))
    dcp.save(_four_tensors("three"), storage_writer=writer)
    assert_holds(OURS.reader(tmp_path), _four_tensors("three"))


@on_every_plugin
def test_object_that_can_not_be_pickled(tmp_path: Path, plugin: Plugin) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({**_four_tensors("one"), "bad": Unsaveable()}, storage_writer=plugin.writer(tmp_path))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert ".metadata" not in file_names(tmp_path)


@pytest.mark.parametrize("plugin", [OURS], ids=str)
def test_last_save_stays_that_of_the_last_save_that_succeeded_or_none(tmp_path: Path, plugin: Plugin) -> None:
    told: list[Any] = []
    writer = plugin.writer(tmp_path, on_save=told.append)
    with pytest.raises(dcp.CheckpointException):
        dcp.save(_four_tensors("one"), storage_writer=writer, planner=FailingSavePlanner("resolve_data"))
    assert writer.last_save is None and told == []
    dcp.save(_four_tensors("two"), storage_writer=writer)
    succeeded = writer.last_save
    with pytest.raises(dcp.CheckpointException):
        dcp.save(_four_tensors("three"), storage_writer=writer, planner=FailingSavePlanner("resolve_data"))
    assert writer.last_save in (None, succeeded) and told == [succeeded]


@on_every_plugin
def test_target_that_can_not_be_written(tmp_path: Path, plugin: Plugin) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path / "file" / "c"))
    assert isinstance(cause_of(caught.value), OSError)
    assert (tmp_path / "file").read_text() == "in the way"
    if plugin == OURS:
        error = cause_of(caught.value)
        assert isinstance(error, errors.StorageError) and error.path is not None
        assert str(tmp_path / "file") in str(error)


@on_every_reader
@pytest.mark.parametrize("step", LOAD_STEPS)
def test_failed_load_raises_and_changes_nothing_on_disk(tmp_path: Path, plugin: Plugin, step: str) -> None:
    dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)}
    reader = plugin.reader(tmp_path)
    state = {key: opposite_of(value) if key != "seed" else None for key, value in _four_tensors("one").items()}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, planner=FailingLoadPlanner(step))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)} == before
    assert_holds(reader, _four_tensors("one"))


@pytest.mark.parametrize("plugin", [ORACLE], ids=str)
def test_the_sabotage_is_what_fails(tmp_path: Path, plugin: Plugin) -> None:
    """Without a step to fail at, the failing planners are the default ones."""
    dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path), planner=FailingSavePlanner("nothing"))
    state = {key: opposite_of(value) if key != "seed" else None for key, value in _four_tensors("one").items()}
    dcp.load(state, storage_reader=plugin.reader(tmp_path), planner=FailingLoadPlanner("nothing"))
    assert_same_bits(state["w3"], _four_tensors("one")["w3"])
