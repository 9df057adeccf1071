"""Equal parts of a `.metadata` are one object, and it says the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import UnsafeMetadataError
from dcp_nvcomp.format.metadata.publishing import metadata_to_publish
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata, share_equal


def tensor(size: tuple[int, ...], shards: int, **properties: Any) -> TensorStorageMetadata:
    rows = size[0] // shards
    return TensorStorageMetadata(
        TensorProperties(**{"dtype": torch.float32, **properties}),
        torch.Size(size),
        [
            ChunkStorageMetadata(torch.Size([at * rows, *(0 for _ in size[1:])]), torch.Size([rows, *size[1:]]))
            for at in range(shards)
        ],
    )


def metadata_of(items: dict[str, Any]) -> Metadata:
    files = [(f"{rank}.distcp", 100, 10, 1) for rank in range(4)]
    places = {
        MetadataIndex("".join(fqn), shard.offsets, at): (files[at], number)
        for number, (fqn, item) in enumerate(items.items())
        for at, shard in enumerate(getattr(item, "chunks", ()))
    }
    return Metadata(items, {"a": 1}, places, StorageMeta("id"), "1.0.0")


def some_items() -> dict[str, Any]:
    return {
        "a": tensor((8, 3), 2),
        "b": tensor((8, 3), 2),
        "same shards, more of them": tensor((16, 3), 4),
        "other dtype": tensor((8, 3), 2, dtype=torch.bfloat16),
        "needs a gradient": tensor((8, 3), 2, requires_grad=True),
        "object": BytesStorageMetadata(),
    }


def test_equal_parts_are_one_object() -> None:
    metadata = metadata_of(some_items())
    before = copy.deepcopy(metadata)
    shared = share_equal(metadata, set())
    assert shared == metadata == before
    items = shared.state_dict_metadata
    assert items["a"] is not items["b"]
    assert items["a"].chunks is not items["b"].chunks
    assert items["a"].chunks[1] is items["b"].chunks[1]
    assert items["a"].size is items["b"].size
    assert items["a"].chunks[0] is items["other dtype"].chunks[0]
    assert items["a"].properties is items["same shards, more of them"].properties
    assert len({id(item.properties) for item in items.values() if isinstance(item, TensorStorageMetadata)}) == 3
    names = {id(name) for name in items}
    assert {id(index.fqn) for index in shared.storage_data} <= names
    offsets = {id(index.offset) for index in shared.storage_data}
    assert len(offsets) == len({index.offset for index in shared.storage_data})


def test_what_differs_only_in_its_type_stays_apart() -> None:
    """The reader takes True for a flag, and refuses 1."""
    shared = share_equal(
        metadata_of({"a": tensor((8,), 1, pin_memory=1), "b": tensor((8,), 1, pin_memory=True)}), set()
    )
    assert [type(item.properties.pin_memory) for item in shared.state_dict_metadata.values()] == [int, bool]


def test_what_is_doubtful_is_not_looked_into() -> None:
    strange: Any = TensorStorageMetadata(None, (8,), "shards")  # type: ignore[arg-type]
    metadata = metadata_of({"a": tensor((8,), 1)})
    metadata.state_dict_metadata["strange"] = strange
    metadata.storage_data = {"strange": 1, **metadata.storage_data}
    shared = share_equal(metadata, {"strange"})
    assert shared.state_dict_metadata["strange"] is strange
    assert shared.storage_data["strange"] == 1


def test_properties_that_cannot_be_hashed() -> None:
    item = tensor((8,), 1)
    item.properties.layout = []  # type: ignore[assignment]
    assert share_equal(metadata_of({"a": item}), set()).state_dict_metadata["a"].properties is item.properties


def test_the_file_is_shorter_and_says_the_same() -> None:
    metadata = metadata_of({f"model.layers.{at}.weight": tensor((8, 3), 2) for at in range(200)})
    plain = copy.deepcopy(metadata)
    data = metadata_to_publish(metadata, path="x")
    assert len(data) < 0.65 * len(pickle.dumps(plain, protocol=4))
    read = parse_metadata(data, path="x")
    assert read.state_dict_metadata == plain.state_dict_metadata == pickle.loads(data).state_dict_metadata
    assert list(read.storage_data) == list(plain.storage_data) == list(pickle.loads(data).storage_data)


def test_what_a_reader_pays_for_by_the_length_of_the_file_is_published_as_it_was() -> None:
    """A list of which the metadata names one far element: readers, those of earlier versions too, take it as it was."""
    metadata = metadata_of({f"layers.{at}": tensor((8, 3), 2) for at in range(3000)})
    shorter, longer = (len(serialize_metadata(one)) for one in (share_equal(metadata, set()), metadata))
    metadata.planner_data = {"layers.0": ("layers", (1 << 16) + (shorter + longer) // 2)}
    with pytest.raises(UnsafeMetadataError):
        parse_metadata(serialize_metadata(share_equal(metadata, set())), path="x")
    data = metadata_to_publish(metadata, path="x")
    assert data == serialize_metadata(metadata)
    assert parse_metadata(data, path="x").planner_data == metadata.planner_data


def test_ordinary_paths_fit() -> None:
    metadata = metadata_of({f"layers.{at}": tensor((8, 3), 2) for at in range(3000)})
    metadata.planner_data = {f"layers.{at}": ("layers", at, "weight") for at in range(3000)}
    assert len(metadata_to_publish(metadata, path="x")) < 0.75 * len(pickle.dumps(metadata, protocol=4))


def test_planner_data_of_another_form_is_published_as_it_was() -> None:
    metadata = metadata_of({f"layers.{at}": tensor((8, 3), 2) for at in range(300)})
    metadata.planner_data = ["a", {"b": 1}]
    assert metadata_to_publish(metadata, path="x") == serialize_metadata(metadata)
