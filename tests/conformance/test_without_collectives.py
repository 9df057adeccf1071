"""`use_collectives=False` with one rank: rank-local metadata. For more ranks see tests/distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import errors

from .plugins import OURS, Plugin, file_names, on_every_plugin, quiet_stock
from .sabotage import FailingSavePlanner, Sabotage
from .values import assert_same_bits, opposite_of, trained

pytestmark = quiet_stock


def _state(seed: str) -> dict[str, Any]:
    return {"w": trained(torch.float32, (300, 500), seed), "seed": seed}


def _assert_holds(reader: Any, seed: str) -> None:
    expected = _state(seed)
    state = {"w": opposite_of(expected["w"]), "seed": None}
    dcp.load(state, storage_reader=reader)
    assert state["seed"] == seed
    assert_same_bits(state["w"], expected["w"])


@on_every_plugin
def test_save_and_load(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save(_state("one"), storage_writer=plugin.writer(tmp_path), use_collectives=False)
    assert "__0.metadata" in file_names(tmp_path) and ".metadata" not in file_names(tmp_path)
    _assert_holds(plugin.reader(tmp_path), "one")


def test_metadata_of_all_ranks_is_merged(tmp_path: Path) -> None:
    dcp.save(_state("one"), storage_writer=OURS.writer(tmp_path), use_collectives=False)
    metadata = OURS.reader(tmp_path).read_metadata()
    assert set(metadata.state_dict_metadata) == {"w", "seed"}
    assert metadata.state_dict_metadata["w"].size == torch.Size([300, 500])


@pytest.mark.parametrize("first_with_collectives", [True, False])
def test_path_that_holds_a_checkpoint_is_refused(tmp_path: Path, first_with_collectives: bool) -> None:
    """N commits can't be one, so nothing could protect the earlier checkpoint."""
    dcp.save(_state("one"), storage_writer=OURS.writer(tmp_path), use_collectives=first_with_collectives)
    before = {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)}
    with pytest.raises(errors.CheckpointExistsError, match="use_collectives"):
        dcp.save(_state("two"), storage_writer=OURS.writer(tmp_path), use_collectives=False)
    assert {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)} == before
    _assert_holds(OURS.reader(tmp_path), "one")


def test_save_with_collectives_over_one_without(tmp_path: Path) -> None:
    dcp.save(_state("one"), storage_writer=OURS.writer(tmp_path), use_collectives=False)
    dcp.save(_state("two"), storage_writer=OURS.writer(tmp_path))
    _assert_holds(OURS.reader(tmp_path), "two")


@on_every_plugin
def test_failure_publishes_nothing(tmp_path: Path, plugin: Plugin) -> None:
    with pytest.raises(Sabotage):
        dcp.save(
            _state("one"),
            storage_writer=plugin.writer(tmp_path),
            planner=FailingSavePlanner("resolve_data", survivors=1),
            use_collectives=False,
        )
    assert not {name for name in file_names(tmp_path) if name.endswith(".metadata")}
    if plugin == OURS:
        assert file_names(tmp_path) == set()
        dcp.save(_state("two"), storage_writer=OURS.writer(tmp_path), use_collectives=False)
        _assert_holds(OURS.reader(tmp_path), "two")
