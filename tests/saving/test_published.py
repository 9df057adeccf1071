"""A writer knows which files its last checkpoint has; whatever else is there is read as any stranger's."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.format.metadata.roots import Root, read_root
from dcp_nvcomp.saving import commit
from dcp_nvcomp.saving.commit import LastPublished
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads, file_names, save
from tests.states import constant_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the metadata files that a commit parses."""
    found: list[str] = []

    def reading(filesystem: Filesystem, name: str) -> Root:
        found.append(name)
        return read_root(filesystem, name)

    monkeypatch.setattr(commit, "read_root", reading)
    return found


def save_with(writer: NvcompWriter, seed: int) -> None:
    dcp.save(constant_state(seed), storage_writer=writer, no_dist=True)


def assert_alone(path: Path, seed: int) -> None:
    """Only the files of this save are left, and it loads."""
    assert_loads(path, constant_state(seed))
    assert file_names(path) == read_root(open_filesystem(path), ".metadata").names()


def test_its_own_checkpoint_is_not_parsed(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    for seed in range(3):
        save_with(writer, seed)
        assert_alone(tmp_path, seed)
    assert parsed == []


def test_what_another_writer_published_is_parsed(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    save_with(writer, 1)
    save(tmp_path, constant_state(2))
    save_with(writer, 3)
    assert parsed == [".metadata"] * 2  # of the same size, as the saves are alike
    assert_alone(tmp_path, 3)


def test_a_copy_of_a_writer_knows_nothing(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    save_with(writer, 1)
    save_with(pickle.loads(pickle.dumps(writer)), 2)
    assert parsed == [".metadata"]
    assert_alone(tmp_path, 2)


def test_each_of_two_places_is_looked_at(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path / "a")
    for seed, place in enumerate("abab"):
        dcp.save(constant_state(seed), checkpoint_id=tmp_path / place, storage_writer=writer, no_dist=True)
    assert parsed == [".metadata"] * 2
    assert_alone(tmp_path / "a", 2)
    assert_alone(tmp_path / "b", 3)


def test_changed_bytes_of_the_same_size_are_parsed(tmp_path: Path, parsed: list[str]) -> None:
    """They can't be, so their files are kept, as always."""
    writer = NvcompWriter(tmp_path)
    save_with(writer, 1)
    kept = {name for name in os.listdir(tmp_path) if name.endswith(".distcp")}
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    save_with(writer, 2)
    assert parsed == [".metadata"]
    assert kept <= file_names(tmp_path)
    assert_loads(tmp_path, constant_state(2))


def test_a_checkpoint_that_was_removed_is_forgotten(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    save_with(writer, 1)
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    save_with(writer, 2)
    assert parsed == []
    assert_alone(tmp_path, 2)


def test_it_is_known_by_its_bytes_wherever_they_are(tmp_path: Path) -> None:
    save(tmp_path, constant_state(1))
    filesystem, last = open_filesystem(tmp_path), LastPublished()
    data = (tmp_path / ".metadata").read_bytes()
    assert last.names_if_current(filesystem, len(data)) is None
    last.note(data, ["a"])
    assert last.names_if_current(filesystem, len(data)) == {"a"}
    assert last.names_if_current(filesystem, len(data) - 1) is None
    last.note(data[:-1] + b"?", ["a"])
    assert last.names_if_current(filesystem, len(data)) is None
