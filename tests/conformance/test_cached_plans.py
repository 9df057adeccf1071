"""`DefaultSavePlanner(enable_plan_caching=True)` replays the first save's plans: nothing of one save may be in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from tests.checkpoints import assert_holds, file_names
from tests.states import assert_same_bits

from .plugins import OURS, Plugin, on_every_plugin, quiet_stock
from .values import trained_state

pytestmark = quiet_stock


class CachingPlanner(DefaultSavePlanner):
    """DCP caches by the name of the class, for the whole process: a name of its own keeps it to this module."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


@pytest.fixture(autouse=True)
def forgotten_plans() -> Iterator[None]:
    yield
    for cache in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        cache.pop(CachingPlanner.__name__, None)


@on_every_plugin
@pytest.mark.parametrize("new_writers", [True, False], ids=["writer-each", "one-writer"])
@pytest.mark.parametrize("paths", [("a", "a", "a"), ("a", "b", "c"), ("a", "b", "a")], ids="".join)
def test_cached_plans(tmp_path: Path, plugin: Plugin, paths: tuple[str, ...], new_writers: bool) -> None:
    writer = plugin.writer(tmp_path / paths[0])
    holds: dict[str, str] = {}
    for seed, path in zip(("one", "two", "three"), paths, strict=True):
        if new_writers:
            writer = plugin.writer(tmp_path / path)
        dcp.save(trained_state(seed), storage_writer=writer, checkpoint_id=tmp_path / path, planner=CachingPlanner())
        holds[path] = seed
        for saved_path, saved_seed in holds.items():
            assert_holds(plugin.reader(tmp_path / saved_path), trained_state(saved_seed))


@on_every_plugin
def test_cached_plan_that_changes(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save(trained_state("one"), storage_writer=plugin.writer(tmp_path / "a"), planner=CachingPlanner())
    wider = {**trained_state("two"), "new": torch.arange(9)}
    dcp.save(wider, storage_writer=plugin.writer(tmp_path / "b"), planner=CachingPlanner())
    assert_holds(plugin.reader(tmp_path / "b"), trained_state("two"))
    state = {"new": torch.zeros(9, dtype=torch.int64)}
    dcp.load(state, storage_reader=plugin.reader(tmp_path / "b"))
    assert_same_bits(state["new"], torch.arange(9))


class _FailsOnSecondSave(CachingPlanner):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self._cached_plans_key = CachingPlanner.__name__
        self.fails = fails

    def resolve_data(self, write_item: Any) -> Any:
        if self.fails and write_item.index.fqn == "w":
            raise RuntimeError("no data today")
        return super().resolve_data(write_item)


def test_cached_plan_after_a_failure(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    dcp.save(trained_state("one"), storage_writer=writer, planner=_FailsOnSecondSave(False))
    before = file_names(tmp_path)
    with pytest.raises(dcp.CheckpointException, match="no data today"):
        dcp.save(trained_state("two"), storage_writer=writer, planner=_FailsOnSecondSave(True))
    assert file_names(tmp_path) == before
    assert_holds(OURS.reader(tmp_path), trained_state("one"))
    dcp.save(trained_state("three"), storage_writer=writer, planner=_FailsOnSecondSave(False))
    assert_holds(OURS.reader(tmp_path), trained_state("three"))
