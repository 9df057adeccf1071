"""Stock checkpoints through NvcompReader: golden ones of each torch release, and fresh ones of the installed one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp import CorruptDataError, NvcompReader, load, open_checkpoint, tools
from dcp_nvcomp.errors import MetadataError
from tests.checkpoints import assert_loads, data_file, flip, save_stock
from tests.loading.stock.make_golden import golden_state


@pytest.mark.parametrize("writer", [FileSystemWriter, FsspecWriter])
@pytest.mark.parametrize("extensions", [None, [ZStandard()], [ZStandard(), ZStandard()]])
@pytest.mark.parametrize(("thread_count", "single_file"), [(1, True), (3, True), (1, False)])
def test_fresh_checkpoint(tmp_path: Path, writer: Any, extensions: Any, thread_count: int, single_file: bool) -> None:
    options = {"thread_count": thread_count, "single_file_per_rank": single_file, "_extensions": extensions}
    dcp.save(golden_state(), storage_writer=writer(str(tmp_path), **options), no_dist=True)
    assert_loads(tmp_path, golden_state())


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_part_of_a_tensor_with_a_lazy_bit(tmp_path: Path, lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    saved = lazy(torch.randn(1024, 32, dtype=torch.complex64))
    assert saved.is_conj() or saved.is_neg()
    save_stock(tmp_path, {"w": saved})
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["w"][10:20], saved[10:20].clone())


def test_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """torch.load does not look at the CRCs that torch.save wrote."""
    save_stock(tmp_path, {"w": torch.arange(1000.0)})
    file = data_file(tmp_path)
    flip(file, 2000)
    reader = NvcompReader(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(1000)}, storage_reader=reader, no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, CorruptDataError) and error.fqn == "w" and error.path == str(file)


def test_an_object_that_compresses_well(tmp_path: Path) -> None:
    """Nothing tells its true size, and as it may run code when it is loaded, a bound of its size would be no help."""
    state = {"zeros": bytes(40 << 20), "moments": torch.zeros(9 << 20)}
    save_stock(tmp_path, state, _extensions=[ZStandard()])
    into: dict[str, Any] = {"zeros": None, "moments": torch.ones(9 << 20)}
    dcp.load(into, storage_reader=NvcompReader(tmp_path), no_dist=True)
    assert into["zeros"] == state["zeros"] and not into["moments"].any()
    with pytest.raises(CheckpointException, match="decodes to more than"):
        dcp.load(into, storage_reader=NvcompReader(tmp_path, safe_objects=True), no_dist=True)
    for full in (False, True):
        assert tools.verify(tmp_path, full=full).findings == ()


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
    assert tools.verify(tmp_path, full=True).findings == ()


def without_the_last_row(metadata: Metadata) -> None:
    (shard,) = metadata.state_dict_metadata["weight"].chunks
    metadata.state_dict_metadata["weight"].size = torch.Size([5, 6])
    assert shard.sizes == torch.Size([4, 6])


def one_row_twice(metadata: Metadata) -> None:
    """As many elements as the tensor has, and not all of them."""
    without_the_last_row(metadata)
    weight = metadata.state_dict_metadata["weight"]
    weight.chunks.append(ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([1, 6])))
    (first,) = (index for index in metadata.storage_data if index.fqn == "weight")
    metadata.storage_data[MetadataIndex("weight", torch.Size([3, 0]))] = metadata.storage_data[first]


@pytest.mark.parametrize("change", [without_the_last_row, one_row_twice])
def test_a_part_that_was_not_saved(tmp_path: Path, change: Callable[[Metadata], None]) -> None:
    """A load that left it as it was would be a wrong one."""
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if change is without_the_last_row:
        with pytest.raises(MetadataError, match="24 of the 30"):
            load({"weight": torch.zeros(5, 6)}, tmp_path, no_dist=True)
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(MetadataError):
            checkpoint["weight"][...]
        assert checkpoint["name"] == "old"
    load({"name": ""}, tmp_path, no_dist=True)
