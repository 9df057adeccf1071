"""Equal parts of a `.metadata` are one object, and it says the same."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp import save
from dcp_nvcomp.errors import MetadataError, UnsafeMetadataError
from dcp_nvcomp.format.metadata import publishable
from dcp_nvcomp.format.metadata.publishable import metadata_to_publish, publication, settled_to_publish
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata, share_equal
from dcp_nvcomp.saving.plans import global_plan
from dcp_nvcomp.saving.plans.global_plan import PlacedItems, PlanOfItems


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


def settled(made: Metadata) -> Metadata:
    found = publication(made, path="x").settled
    assert found is not None
    return found


@pytest.mark.parametrize("more", [0, 300])
def test_another_save_takes_the_same_form(more: int) -> None:
    made = metadata_of({**some_items(), **{f"layers.{at}": tensor((8, 3), 2) for at in range(more)}})
    later = settled(made)
    elsewhere = {file: (f"later-{file[0]}", *file[1:]) for file, _ in made.storage_data.values()}
    later.storage_data = {index: (elsewhere[file], record) for index, (file, record) in later.storage_data.items()}
    fresh = dataclasses.replace(made, storage_data=dict(later.storage_data))
    data = settled_to_publish(later, path="x")
    assert data == metadata_to_publish(fresh, path="x")
    assert parse_metadata(data, path="x").storage_data.keys() == made.storage_data.keys()


@pytest.mark.parametrize("at", [0, 2, -1])
@pytest.mark.parametrize("place", [(("../x.distcp", 100, 10, 1), 0), (("0.distcp", 100, 10, 1), -1), "nowhere"])
def test_places_that_no_load_could_read_are_refused(place: Any, at: int) -> None:
    later = settled(metadata_of({f"layers.{number}": tensor((8, 3), 2) for number in range(300)}))
    later.storage_data[list(later.storage_data)[at]] = place
    with pytest.raises(MetadataError):
        settled_to_publish(later, path="x")


def test_a_file_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    later = settled(metadata_of(some_items()))
    monkeypatch.setattr("dcp_nvcomp.format.metadata.publishable.MAX_METADATA_NBYTES", 100)
    with pytest.raises(MetadataError, match="a load accepts 100"):
        settled_to_publish(later, path="x")


def test_a_file_that_a_load_may_refuse_by_default_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = settled(metadata_of(some_items()))
    nbytes = len(settled_to_publish(later, path="x"))
    for limit_nbytes, is_warned in ((4 * nbytes, False), (3 * nbytes, True)):
        caplog.clear()
        monkeypatch.setattr("dcp_nvcomp.format.metadata.publishable.MAX_METADATA_NBYTES", limit_nbytes)
        settled_to_publish(later, path="run/.metadata")
        assert (f"run/.metadata has {nbytes} bytes" in caplog.text) == is_warned
        assert (f"metadata_limit_nbytes={-(-10 * nbytes // 3)}." in caplog.text) == is_warned


def test_what_only_the_reader_can_judge_is_never_settled() -> None:
    assert publication(metadata_of({"a": dataclasses.replace(tensor((8,), 1), size=(8,))}), path="x").settled is None
    far = metadata_of({f"layers.{number}": BytesStorageMetadata() for number in range(3000)})
    far.planner_data = {"layers.0": ("layers", 1 << 16)}  # a reader pays for it by the length of the file
    assert publication(far, path="x").settled is not None
    far.planner_data = {"layers.0": ("layers", (1 << 16) + len(metadata_to_publish(far, path="x")) * 3 // 4)}
    assert publication(far, path="x").settled is None


def test_saves_by_one_plan_settle_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Metadata] = []

    def publishing(metadata: Metadata, **options: Any) -> Any:
        made.append(metadata)
        return publication(metadata, **options)

    monkeypatch.setattr(global_plan, "publication", publishing)
    planner = DefaultSavePlanner()
    planner.set_up_planner({f"layers.{at}.weight": torch.ones(8, 3) for at in range(150)}, is_coordinator=True)
    plan = PlanOfItems(*planner.create_global_plan([planner.create_local_plan()]))
    data = []
    for number in range(3):
        metadata = plan.metadata()
        metadata.storage_meta, metadata.version = StorageMeta("id", f"{number:032x}"), "1.0.0"
        numbers = array("I", range(150))
        metadata.place([PlacedItems(((f"{number}.distcp", 100, 10, 1),), (150,), numbers, numbers)])
        data.append(metadata.to_publish("x", None))
        assert metadata.files() == {f"{number}.distcp": 100}
    assert len(made) == 1
    for later in data[1:]:
        assert abs(len(later) - len(data[0])) < 16, "equal parts are one object in all of them"
        ours, theirs = pickle.loads(later), pickle.loads(data[0])
        assert ours.state_dict_metadata == theirs.state_dict_metadata
        assert ours.planner_data == theirs.planner_data
        assert list(ours.storage_data) == list(theirs.storage_data)


def test_what_the_ranks_computed_is_read_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(publishable, "parse_metadata", lambda data, **options: read.append(len(data)))
    for _ in range(3):
        save({f"layers.{at}.weight": torch.full((8, 3), float(at)) for at in range(150)}, tmp_path, no_dist=True)
    assert len(read) == 1 and read[0] < (tmp_path / ".metadata").stat().st_size
