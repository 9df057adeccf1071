"""Stock checkpoints with what older releases, or planners, put into `.metadata` and stock DCP takes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from dcp_nvcomp import NvcompReader
from dcp_nvcomp.maintenance.verify import verify_checkpoint


def state() -> dict[str, Any]:
    return {"weight": torch.arange(24.0).reshape(4, 6), "step": torch.tensor(7), "name": "old"}


def tensors(metadata: Metadata) -> list[Any]:
    return [item for item in metadata.state_dict_metadata.values() if isinstance(item, TensorStorageMetadata)]


def old_properties(metadata: Metadata) -> None:
    """Before DCP had TensorProperties of its own."""
    for item in tensors(metadata):
        item.properties = OldTensorProperties(item.properties.dtype, pin_memory=True)


def tuples(metadata: Metadata) -> None:
    for item in tensors(metadata):
        item.size, item.chunks = tuple(item.size), tuple(item.chunks)
        for shard in item.chunks:
            shard.offsets, shard.sizes = tuple(shard.offsets), list(shard.sizes)
    for index in metadata.storage_data:
        if index.offset is not None:
            object.__setattr__(index, "offset", tuple(index.offset))


def without_what_came_later(metadata: Metadata) -> None:
    old_properties(metadata)
    del metadata.storage_meta, metadata.version


@pytest.mark.parametrize("change", [old_properties, tuples, without_what_came_later])
@pytest.mark.parametrize("protocol", [2, 4])
def test_loads(tmp_path: Path, change: Callable[[Metadata], None], protocol: int) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    read = NvcompReader(tmp_path).read_metadata()
    for item in tensors(read):
        assert type(item.properties) is TensorProperties and type(item.size) is torch.Size
        assert item.properties.pin_memory == (change is not tuples)
        assert type(item.chunks) is list and all(type(shard.offsets) is torch.Size for shard in item.chunks)
    into = {"weight": torch.zeros(4, 6), "step": torch.tensor(0), "name": ""}
    dcp.load(into, storage_reader=NvcompReader(tmp_path), no_dist=True)
    assert torch.equal(into["weight"], state()["weight"]) and int(into["step"]) == 7 and into["name"] == "old"
    assert verify_checkpoint(tmp_path, full=True).findings == ()
