"""`use_collectives=False` with several ranks: each rank commits on its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_nvcomp import NvcompReader, errors
from tests.checkpoints import assert_holds, file_names
from tests.conformance.plugins import OURS, Plugin, on_every_plugin, quiet_stock
from tests.conformance.values import trained
from tests.distributed.jobs import sharded
from tests.distributed.launch import RankPool
from tests.states import assert_same_bits, opposite_of

pytestmark = quiet_stock


def _full(seed: str) -> torch.Tensor:
    return trained(torch.float32, (301, 200), seed)


def _sharded(value: torch.Tensor) -> Any:
    return sharded({"": value})[""]


def _save(plugin: Plugin, path: Path, seed: str = "one") -> None:
    """A sharded tensor, and what every rank has of its own under the same key."""
    rank = dist.get_rank()
    state = {"w": _sharded(_full(seed)), "own": torch.full((5,), float(rank)), "object": {"rank": rank}}
    dcp.save(state, storage_writer=plugin.writer(path), use_collectives=False)


def _load_own(plugin: Plugin, path: Path, seed: str = "one") -> None:
    rank = dist.get_rank()
    state = {"w": _sharded(opposite_of(_full(seed))), "own": torch.full((5,), -1.0), "object": {"rank": None}}
    dcp.load(state, storage_reader=plugin.reader(path))
    assert_same_bits(state["w"].to_local(), _sharded(_full(seed)).to_local(), "w")
    assert_same_bits(state["own"], torch.full((5,), float(rank)), "own")
    assert state["object"] == {"rank": rank}


@on_every_plugin
@pytest.mark.parametrize("world_size", [2, 4])
def test_loads_rank_by_rank(ranks: RankPool, tmp_path: Path, plugin: Plugin, world_size: int) -> None:
    ranks.run(_save, plugin, tmp_path, world_size=world_size)
    names = {name for name in file_names(tmp_path) if name.endswith(".metadata")}
    assert names >= {f"__{rank}.metadata" for rank in range(world_size)} and ".metadata" not in names
    ranks.run(_load_own, plugin, tmp_path, world_size=world_size)


def _load_sharded(path: Path) -> None:
    state = {"w": _sharded(opposite_of(_full("one")))}
    dcp.load(state, storage_reader=OURS.reader(path))
    assert_same_bits(state["w"].to_local(), _sharded(_full("one")).to_local(), "w")


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [1, 3])
def test_merged_metadata_loads_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    ranks.run(_save, OURS, tmp_path, world_size=4)
    ranks.run(_load_sharded, tmp_path, world_size=world_size)


def test_merged_metadata_without_a_process_group(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save, OURS, tmp_path, world_size=3)
    metadata = OURS.reader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata["w"].size == torch.Size([301, 200])
    assert len(metadata.state_dict_metadata["w"].chunks) == 3
    assert_holds(OURS.reader(tmp_path), {"w": _full("one")})


@pytest.mark.parametrize("lost_rank", [0, 1, 2])
def test_metadata_that_covers_not_all_is_refused(ranks: RankPool, tmp_path: Path, lost_rank: int) -> None:
    """As when one rank was killed before it committed."""
    ranks.run(_save, OURS, tmp_path, world_size=3)
    (tmp_path / f"__{lost_rank}.metadata").unlink()
    with pytest.raises(errors.CheckpointError, match=rf"\bw\b|\brank {lost_rank}\b"):
        OURS.reader(tmp_path).read_metadata()


def _value(seed: str) -> torch.Tensor:
    return trained(torch.float32, (64, 300), seed)


def _save_alone(path: Path, seed: str) -> None:
    """Save as another job: one process, no collective with the ranks that load."""
    dcp.save({"w": _value(seed)}, storage_writer=OURS.writer(path), no_dist=True)


class _ReplacedBetweenReads(NvcompReader):
    """Rank 0 reads the metadata, then another save finishes, then the other ranks read it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if dist.get_rank() == 0:
            metadata = super().read_metadata(*args, **kwargs)
        dist.barrier()
        if dist.get_rank() == 1:
            _save_alone(Path(self.checkpoint_id), "two")
        dist.barrier()
        return metadata if dist.get_rank() == 0 else super().read_metadata(*args, **kwargs)


class _ReplacedAfterPlanning(NvcompReader):
    """All ranks have read the same metadata and planned when another save finishes."""

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        dist.barrier()
        if dist.get_rank() == 0:
            _save_alone(Path(self.checkpoint_id), "two")
        dist.barrier()
        return super().read_data(plan, planner)


def _load(path: Path, reader: NvcompReader | None = None) -> torch.Tensor:
    state = {"w": _sharded(opposite_of(_value("one")))}
    dcp.load(state, storage_reader=reader or OURS.reader(path))
    return state["w"].full_tensor()


def _load_while_replaced_between_reads(path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match=re.escape(str(path))) as caught:
        _load(path, _ReplacedBetweenReads(path))
    causes = [cause for cause, _ in caught.value.failures.values()]
    assert all(isinstance(cause, errors.CheckpointReplacedError) for cause in causes), causes
    assert_same_bits(_load(path), _value("two"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_saw_different_saves_are_refused(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    _save_alone(tmp_path, "one")
    ranks.run(_load_while_replaced_between_reads, tmp_path, world_size=world_size)


def _load_different_checkpoints(paths: list[Path]) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        _load(paths[dist.get_rank()])
    (cause,) = [cause for cause, _ in caught.value.failures.values()]
    assert isinstance(cause, errors.ConfigurationError), cause
    assert all(repr(str(path)) in str(cause) for path in paths), cause


def test_ranks_that_load_different_checkpoints_are_told_so(ranks: RankPool, tmp_path: Path) -> None:
    """As Transformers' Trainer may ask for: see docs/frameworks/transformers.md."""
    paths = [tmp_path / "step-4", tmp_path / "step-6"]
    for path, seed in zip(paths, ("one", "two"), strict=True):
        _save_alone(path, seed)
    ranks.run(_load_different_checkpoints, paths, world_size=2)


def _load_while_replaced_after_planning(path: Path) -> None:
    try:
        loaded = _load(path, _ReplacedAfterPlanning(path))
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        assert all(isinstance(cause, errors.CheckpointError) for cause in causes), causes
    else:
        assert_same_bits(loaded, _value("one"))
    assert_same_bits(_load(path), _value("two"))


def test_load_goes_on_from_the_files_of_the_earlier_save(ranks: RankPool, tmp_path: Path) -> None:
    _save_alone(tmp_path, "one")
    ranks.run(_load_while_replaced_after_planning, tmp_path, world_size=2)
