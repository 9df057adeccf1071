"""`use_collectives=False` with one rank: rank-local metadata. For more ranks see tests/distributed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import errors
from tests.checkpoints import assert_holds, file_names

from .plugins import OURS, Plugin, on_every_plugin, quiet_stock
from .sabotage import FailingSavePlanner, Sabotage
from .values import trained_state

pytestmark = quiet_stock


@on_every_plugin
def test_save_and_load(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save(trained_state("one"), storage_writer=plugin.writer(tmp_path), use_collectives=False)
    assert "__0.metadata" in file_names(tmp_path) and ".metadata" not in file_names(tmp_path)
    assert_holds(plugin.reader(tmp_path), trained_state("one"))


@pytest.mark.parametrize("first_with_collectives", [True, False])
def test_path_that_holds_a_checkpoint_is_refused(tmp_path: Path, first_with_collectives: bool) -> None:
    """N commits can't be one, so nothing could protect the earlier checkpoint."""
    dcp.save(trained_state("one"), storage_writer=OURS.writer(tmp_path), use_collectives=first_with_collectives)
    before = {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)}
    with pytest.raises(errors.CheckpointExistsError, match="use_collectives"):
        dcp.save(trained_state("two"), storage_writer=OURS.writer(tmp_path), use_collectives=False)
    assert {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)} == before
    assert_holds(OURS.reader(tmp_path), trained_state("one"))


@on_every_plugin
def test_failure_publishes_nothing(tmp_path: Path, plugin: Plugin) -> None:
    with pytest.raises(Sabotage):
        dcp.save(
            trained_state("one"),
            storage_writer=plugin.writer(tmp_path),
            planner=FailingSavePlanner("resolve_data", survivors=1),
            use_collectives=False,
        )
    assert not {name for name in file_names(tmp_path) if name.endswith(".metadata")}
    if plugin == OURS:
        assert file_names(tmp_path) == set()
        dcp.save(trained_state("two"), storage_writer=OURS.writer(tmp_path), use_collectives=False)
        assert_holds(OURS.reader(tmp_path), trained_state("two"))
