"""Prepared saves: the parts of a save as values, any number of them under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.saving.rank_save import RankResults
from dcp_nvcomp.saving.saves import PreparedWrite
from tests.checkpoints import assert_loads
from tests.saving.test_lifecycle import FailsToFinish


def state_of(seed: int) -> dict[str, Any]:
    return {"w": torch.randn(1000, generator=torch.Generator().manual_seed(seed)), "seed": seed}


def prepared(writer: NvcompWriter, path: Path, state: dict[str, Any]) -> tuple[PreparedWrite, RankResults, Metadata]:
    """Prepare and write a save of one rank."""
    writer.reset(path)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    own = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    part = writer.prepare(own)
    results = part.write(planner.resolve_data, process_state().choices)
    writer.written(part, results)
    return part, results, metadata


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_saves_that_overlap(tmp_path: Path, order: tuple[int, int]) -> None:
    writer = NvcompWriter(tmp_path)
    paths = [tmp_path / "0", tmp_path / "1"]
    saves = [prepared(writer, path, state_of(number)) for number, path in enumerate(paths)]
    for number in order:
        part, results, metadata = saves[number]
        writer.finish_prepared(part, metadata, [results])
    for number, path in enumerate(paths):
        assert_loads(path, state_of(number))


def test_a_plain_save_while_a_prepared_one_is_under_way(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path)
    part, results, metadata = prepared(writer, tmp_path / "0", state_of(0))
    for number in (1, 2):
        path = tmp_path / str(number)
        dcp.save(state_of(number), storage_writer=writer, checkpoint_id=path, no_dist=True)
        assert_loads(path, state_of(number))
    writer.finish_prepared(part, metadata, [results])
    assert_loads(tmp_path / "0", state_of(0))


def test_what_a_failed_plain_save_left_goes_when_the_next_is_prepared(tmp_path: Path) -> None:
    writer = FailsToFinish(tmp_path)
    writer.fails = True
    with pytest.raises(CheckpointException):
        dcp.save(state_of(0), storage_writer=writer, checkpoint_id=tmp_path / "0", no_dist=True)
    assert list((tmp_path / "0").glob("*.distcp"))
    part, results, metadata = prepared(writer, tmp_path / "1", state_of(1))
    assert not list((tmp_path / "0").glob("*.distcp"))
    writer.fails = False
    writer.finish_prepared(part, metadata, [results])
    assert_loads(tmp_path / "1", state_of(1))


def test_the_plan_of_a_rank_that_has_prepared_saves_under_way(tmp_path: Path) -> None:
    """A coordinator may say that its last save failed; of what this rank has prepared it knows nothing."""
    writer = NvcompWriter(tmp_path)
    part, results, metadata = prepared(writer, tmp_path / "0", state_of(0))
    writer.reset(tmp_path / "1")
    writer.set_up_storage_writer(False, rank=1)
    writer.prepare(SavePlan([], storage_data=True))
    writer.finish_prepared(part, metadata, [results])
    assert_loads(tmp_path / "0", state_of(0))


def test_the_statistics_say_whose_they_are(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path)
    part, results, metadata = prepared(writer, tmp_path / "0", state_of(0))
    writer.finish_prepared(part, metadata, [results])
    stats = writer.last_save
    assert stats is not None and [one.rank for one in stats.ranks] == [0]
    assert stats.ranks[0].seconds["plan"] > 0
