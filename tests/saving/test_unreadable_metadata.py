"""A planner that puts strange things into the metadata: the save is readable, or it fails and the old one is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp import NvcompWriter, tools
from dcp_nvcomp.errors import MetadataError
from tests.checkpoints import assert_loads
from tests.states import State

Change = Callable[[Metadata], Any]


class MyTensor(TensorStorageMetadata):
    """A planner's."""


class MyMetadata(Metadata):
    """A planner's."""


class Planner(dcp.DefaultSavePlanner):
    """Changes the metadata of its saves."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, self.change(metadata) or metadata


def three_keys(seed: int) -> State:
    return {"a": torch.full((4, 6), float(seed)), "b": torch.arange(3) + seed, "c": seed}


def save(path: Path, seed: int, change: Change | None = None, **options: Any) -> None:
    options = options or {"no_dist": True}
    dcp.save(three_keys(seed), storage_writer=NvcompWriter(path), planner=change and Planner(change), **options)


def tensor(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["a"]


def _tuples(metadata: Metadata) -> None:
    item = tensor(metadata)
    item.size, item.chunks = (4, 6), (ChunkStorageMetadata((0, 0), (4, 6)),)  # type: ignore[arg-type]


# All that is accepted or refused is in tests/format/metadata/test_publishing.py.
ACCEPTED: dict[str, Change] = {"tuples": _tuples, "subclass of metadata": lambda m: MyMetadata(**vars(m))}
REFUSED: dict[str, Change] = {
    "a tensor without properties": lambda m: m.state_dict_metadata.update(a=object.__new__(MyTensor)),
    "a shard outside": lambda m: setattr(tensor(m).chunks[0], "offsets", torch.Size([1, 0])),
    "planner_data that can't be pickled": lambda m: m.planner_data.update(a=lambda: None),
}


@pytest.mark.parametrize("options", [{}, {"use_collectives": False}], ids=["", "without collectives"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_has_an_equivalent_is_saved(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    save(tmp_path, 2, ACCEPTED[name], **options)
    assert_loads(tmp_path, three_keys(2))
    assert tools.verify(tmp_path, full=True).findings == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_none_leaves_the_old_checkpoint(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointException, match="no load could read its metadata") as caught:
        save(tmp_path, 2, REFUSED[name])
    assert isinstance(caught.value.failures[0][0], MetadataError)
    assert sorted(tmp_path.iterdir()) == before, "the files of the failed save are gone"
    assert_loads(tmp_path, three_keys(1))


@pytest.mark.parametrize("name", REFUSED)
def test_nor_is_anything_published_without_collectives(tmp_path: Path, name: str) -> None:
    with pytest.raises((CheckpointException, MetadataError), match="no load could read its metadata"):
        save(tmp_path, 2, REFUSED[name], use_collectives=False)
    assert list(tmp_path.iterdir()) == []
