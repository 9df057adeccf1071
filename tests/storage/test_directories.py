"""What is special of storage with real directories, links and files that are made exclusively: disk, SFTP, SMB."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import ConcurrentSaveError, StorageError
from dcp_nvcomp.storage.base import Filesystem
from tests.servers.base import Location
from tests.stores.kinds import parameters

from .files import opened


@pytest.fixture(params=parameters("disk", "mounted", "sftp", "smb"))
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: Any, place: Location) -> Path:
    """The same directory as this machine sees it."""
    found: Path = kind.folder(place[0])
    return found


def test_a_directory_in_the_way(filesystem: Filesystem, folder: Path, kind_name: str) -> None:
    (folder / "taken").mkdir()
    with pytest.raises(StorageError) as caught:
        filesystem.open_output("taken")
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(StorageError):
        filesystem.publish("taken", b"x")
    with pytest.raises(StorageError):
        filesystem.read("taken", 0, 1)
    with pytest.raises(ConcurrentSaveError):
        filesystem.publish("taken", b"x", overwrite=False)
    with pytest.raises(StorageError):
        filesystem.remove(["taken"])
    assert filesystem.file_nbytes("taken") is None and filesystem.list_names() == []
    assert (folder / "taken").is_dir()


def test_a_file_in_the_way_of_the_directory(place: Location, folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_bytes(b"x")
    for filesystem in (opened(place), opened(place, below="below")):
        with pytest.raises(StorageError) as caught:
            filesystem.create_directory()
        assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST) and caught.value.path == filesystem.path
        assert filesystem.list_names() == [] and filesystem.file_nbytes("a") is None
        for write in (lambda: filesystem.publish("a", b"x"), lambda: filesystem.open_output("a")):
            with pytest.raises(StorageError):
                write()
        filesystem.remove(["a"])
        filesystem.remove_directory()
    assert folder.read_bytes() == b"x"


def test_a_file_of_another_is_never_written_into(filesystem: Filesystem) -> None:
    filesystem.publish("data", b"theirs")
    with pytest.raises(StorageError) as caught:
        filesystem.open_output("data")
    assert caught.value.errno == errno.EEXIST
    assert filesystem.read_all("data", limit_nbytes=10) == b"theirs"


def test_only_an_empty_directory_is_removed(filesystem: Filesystem, folder: Path) -> None:
    filesystem.publish("a", b"x")
    filesystem.remove_directory()
    assert filesystem.list_names() == ["a"]
    filesystem.remove(["a"])
    filesystem.remove_directory()
    assert not folder.exists()
    filesystem.remove_directory()


def test_a_file_behind_a_link(filesystem: Filesystem, folder: Path, kind_name: str) -> None:
    """Where reads follow the link, listings must show it: `clean` takes what has no root. On disk they do not."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes(b"behind a link")
    (folder / ".metadata").symlink_to(elsewhere)
    (folder / "broken").symlink_to(folder / "nowhere")
    if kind_name in ("disk", "mounted"):
        assert filesystem.list_files() == []
        return
    assert filesystem.read_all(".metadata", limit_nbytes=100) == b"behind a link"
    assert filesystem.file_nbytes(".metadata") == 13
    assert [(file.name, file.nbytes) for file in filesystem.list_files()] == [(".metadata", 13)]
    assert filesystem.file_nbytes("broken") is None
