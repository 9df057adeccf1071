"""The metadata of a later save by the same plan: what was made readable once needs only its places checked."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dcp_nvcomp import save
from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.format.metadata.publishing import metadata_to_publish, publication, settled_to_publish
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.saving import commit
from tests.format.metadata.test_sharing import metadata_of, some_items, tensor


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
    monkeypatch.setattr("dcp_nvcomp.format.metadata.publishing.MAX_METADATA_NBYTES", 100)
    with pytest.raises(MetadataError, match="a load accepts 100"):
        settled_to_publish(later, path="x")


def test_a_file_that_a_load_may_refuse_by_default_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = settled(metadata_of(some_items()))
    nbytes = len(settled_to_publish(later, path="x"))
    for limit_nbytes, is_warned in ((4 * nbytes, False), (3 * nbytes, True)):
        caplog.clear()
        monkeypatch.setattr("dcp_nvcomp.format.metadata.publishing.MAX_METADATA_NBYTES", limit_nbytes)
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


def test_saves_by_one_plan_settle_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Metadata] = []

    def publishing(metadata: Metadata, **options: Any) -> Any:
        made.append(metadata)
        return publication(metadata, **options)

    monkeypatch.setattr(commit, "publication", publishing)
    state = {f"layers.{at}.weight": torch.full((8, 3), float(at)) for at in range(150)}
    for number in range(3):
        save(state, tmp_path / str(number), no_dist=True)
    assert len(made) == 1
    first, *later = ((tmp_path / str(number) / ".metadata").read_bytes() for number in range(3))
    for data in later:
        assert abs(len(data) - len(first)) < 16, "equal parts are one object in all of them"
        ours, theirs = pickle.loads(data), pickle.loads(first)
        assert ours.state_dict_metadata == theirs.state_dict_metadata
        assert ours.planner_data == theirs.planner_data
        assert list(ours.storage_data) == list(theirs.storage_data)
