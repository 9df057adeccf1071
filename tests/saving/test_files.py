"""Which files a save leaves behind, and which it removes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.errors import CheckpointReplacedError
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.saving.data_files import WrittenFile
from dcp_nvcomp.saving.rank_save import placed_items
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import assert_loads, save
from tests.saving.test_lifecycle import FailsToFinish


def state_of_sizes(seed: int = 0, tensors: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(1 << 20) + 17, 400_000, 70_000, 300, 7, 1]
    made = {f"t{i}": torch.randn(sizes[i % len(sizes)], generator=generator) for i in range(tensors)}
    return {**made, "object": {"seed": seed}}


def data_files(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith(".distcp"))


def test_one_file_per_item(tmp_path: Path) -> None:
    content = state_of_sizes()
    writer = save(tmp_path, content, single_file_per_rank=False, thread_count=3)
    assert len(data_files(tmp_path)) == len(content)
    assert writer.last_save is not None and sorted(writer.last_save.files) == data_files(tmp_path)
    assert_loads(tmp_path, content)


@pytest.mark.parametrize("thread_count", [1, 2, 5])
def test_several_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread_count: int) -> None:
    monkeypatch.setattr(PosixFilesystem, "file_nbytes_worthwhile", 1 << 20)
    content = state_of_sizes(tensors=60)
    save(tmp_path, content, thread_count=thread_count)
    assert len(data_files(tmp_path)) == min(2, thread_count)
    sizes = [os.path.getsize(tmp_path / name) for name in data_files(tmp_path)]
    assert max(sizes) < 2 * min(sizes)
    assert_loads(tmp_path, content)


def test_tiny_budget(tmp_path: Path) -> None:
    content = state_of_sizes()
    save(tmp_path, content, host_memory_budget=1, thread_count=4)
    assert_loads(tmp_path, content, host_memory_budget=1, thread_count=4)


def test_no_thread_outlives_a_save_or_a_load(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    save(tmp_path, state_of_sizes(), thread_count=4)
    assert_loads(tmp_path, state_of_sizes(), thread_count=4)
    assert set(threading.enumerate()) == before


def test_nothing_to_save(tmp_path: Path) -> None:
    save(tmp_path, {})
    assert data_files(tmp_path) == []
    dcp.load({}, storage_reader=NvcompReader(tmp_path), no_dist=True)


def test_overwriting_removes_what_was_replaced(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path)
    (tmp_path / "notes.txt").write_text("keep me")
    for seed in range(3):
        dcp.save(state_of_sizes(seed), storage_writer=writer, no_dist=True)
        assert len(os.listdir(tmp_path)) == 4, "data file, .metadata, its copy, and what was there before"
        assert_loads(tmp_path, state_of_sizes(seed))


def test_stock_reader_shows_keys_and_shapes(tmp_path: Path) -> None:
    save(tmp_path, state_of_sizes())
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata["t0"].size == torch.Size([(1 << 20) + 17])
    assert set(metadata.state_dict_metadata) == {*(key for key in state_of_sizes() if key != "object"), "object.seed"}


def test_replaced_between_metadata_and_data(tmp_path: Path) -> None:
    """A save replaces the checkpoint after this load read `.metadata`: its data files are gone."""

    class Slow(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> dcp.LoadPlan:
            save(tmp_path, state_of_sizes(2))
            return super().create_local_plan()

    save(tmp_path, state_of_sizes(1))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"t0": torch.zeros((1 << 20) + 17)}, storage_reader=NvcompReader(tmp_path), planner=Slow(), no_dist=True
        )
    assert isinstance(caught.value.failures[0][0], CheckpointReplacedError)
    assert_loads(tmp_path, state_of_sizes(2))


def test_orphans_are_removed_at_the_next_save(tmp_path: Path) -> None:
    """Between write_data and finish another rank failed: this rank hears nothing, and cleans up at its next save."""
    writer = FailsToFinish(tmp_path / "a")
    writer.fails = True
    with pytest.raises(CheckpointException):
        dcp.save(state_of_sizes(1), storage_writer=writer, no_dist=True)
    assert len(data_files(tmp_path / "a")) == 1
    writer.fails = False
    dcp.save(state_of_sizes(2), storage_writer=writer, checkpoint_id=tmp_path / "b", no_dist=True)
    assert data_files(tmp_path / "a") == []
    assert_loads(tmp_path / "b", state_of_sizes(2))
    dcp.save(state_of_sizes(3), storage_writer=writer, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_loads(tmp_path / "b", state_of_sizes(2))
    assert_loads(tmp_path / "c", state_of_sizes(3))


def test_many_records(tmp_path: Path) -> None:
    """Of a small plan: packs are records too, and a shared file may have more than this rank has items."""
    (item,) = create_default_local_save_plan({"w": torch.zeros(1)}, True).items
    file = WrittenFile(DataFileRef("x.distcp", 100, 10, 1), [(item.index, 4, 70_000)])
    placed = placed_items([file], SavePlan([item]))
    assert list(placed.records) == [70_000] and list(placed.positions) == [0]
