"""torch_checkpointing on object stores: whole jobs, and servers that are killed at each stage of a save."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.integrations import torch_checkpointing_commit
from tests.conftest import KindNamed, S3Store
from tests.integrations.launch import check_resumed, needs, start
from tests.integrations.torch_checkpointing_storage import commit, get, put, state, storage_of
from tests.states import assert_same

SAVED, LAST = 3, 5
STAGES = ["before the first file", "within a file", "before the second file", "before the commit", "in the commit"]


@pytest.fixture(autouse=True)
def torch_checkpointing() -> None:
    needs("torch_checkpointing", "torch-checkpointing==0.1.1")


@pytest.mark.ci
@pytest.mark.s3
@pytest.mark.parametrize("store", ["real_s3_store", pytest.param("azure_store", marks=pytest.mark.slow)])
def test_killed_and_resumed(tmp_path: Path, store: str, request: pytest.FixtureRequest) -> None:
    place: S3Store = request.getfixturevalue(store)
    start("torch_checkpointing", tmp_path, "train", *map(json.dumps, place), killed=True)
    start("torch_checkpointing", tmp_path, "resume", *map(json.dumps, place))
    check_resumed(tmp_path, SAVED, LAST)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize("store", ["real_s3_store", "azure_store"])
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (4, 2), (2, 3)])
def test_other_ranks_and_placements(
    tmp_path: Path, store: str, saved: int, loaded: int, request: pytest.FixtureRequest
) -> None:
    place = list(map(json.dumps, request.getfixturevalue(store)))
    start("torch_checkpointing", tmp_path, "save", *place, ranks=saved)
    output = start("torch_checkpointing", tmp_path, "reshard", *place, ranks=loaded)
    assert output.count("resharded exactly") == 2 * loaded


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gcs", "azure", pytest.param("own_ceph", marks=[pytest.mark.slow, pytest.mark.s3])])
def test_a_server_is_killed(name: str, kind_named: KindNamed, monkeypatch: pytest.MonkeyPatch) -> None:
    server = kind_named(name)
    place = server.place()
    commit(storage_of(place), "old", seed=7)
    for stage in STAGES:
        storage = storage_of(place, storage_deadline_seconds=2.0)
        with pytest.raises(CheckpointError), monkeypatch.context() as patch:
            _save(storage, killing(server.kill, stage), patch)
        server.start()
        reader = storage_of(place)
        assert_same(get(reader, "old/model_0.pt"), state(7))
        assert not reader.exists(Path("step-1")), stage
    assert_same(commit(storage_of(place), seed=3), state(3))
    assert_same(get(storage_of(place), "step-1/model_0.pt"), state(3))
    server.remove(place[0])


def killing(kill: Callable[[], None], stage: str) -> Callable[[str], None]:
    """Return what a save calls at each stage, perhaps on several threads: at one of them it kills, once."""
    kills = iter([kill])

    def at(here: str) -> None:
        for once in kills if here == stage else ():
            once()

    return at


def _save(storage: Any, at: Callable[[str], None], patch: pytest.MonkeyPatch) -> None:
    storage.mkdir(Path("tmp_step-1"))
    at("before the first file")
    with storage.get_write_stream(Path("tmp_step-1/raw"), None) as stream:
        stream.write(b"half")
        at("within a file")
        stream.write(b"more")
    at("before the second file")
    put(storage, "tmp_step-1/model_0.pt", state(1))
    at("before the commit")
    find = torch_checkpointing_commit.find_data_file

    def found(*arguments: Any) -> Any:
        file = find(*arguments)
        at("in the commit")
        return file

    patch.setattr(torch_checkpointing_commit, "find_data_file", found)
    storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
