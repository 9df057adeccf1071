"""Filesystems with nothing but what fsspec asks of each, and what is made of the moves that they have."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import SimpleCacheFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.spec import AbstractFileSystem

from dcp_nvcomp.errors import ConcurrentSaveError, StorageError
from dcp_nvcomp.storage.base import is_not_found
from dcp_nvcomp.storage.fsspec_files import FsspecFilesystem, _finds_by_itself, modified_seconds
from dcp_nvcomp.storage.fsspec_output import Moves
from dcp_nvcomp.storage.open import open_filesystem

from .plain import ATOMIC, PROTOCOLS, MovingFilesystem, PlainFilesystem, carry_out, hooked

GAP = "can't replace a file in one step"
DIR_HANDS_ON = DirFileSystem.mv is not AbstractFileSystem.mv  # since fsspec 2024.5


@pytest.mark.parametrize("chain", ["dir://::", "simplecache::"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_chains_have_what_the_innermost_has(protocol: str, chain: str, tmp_path: Path) -> None:
    fs, root = fsspec.url_to_fs(f"{protocol}://{tmp_path}")
    chained = DirFileSystem(root, fs) if chain.startswith("dir") else fsspec.url_to_fs(f"{chain}{protocol}://{root}")[0]
    assert Moves(fs).can_move == (protocol != "plain")
    assert Moves(chained).can_move == (Moves(fs).can_move and (DIR_HANDS_ON or not chain.startswith("dir")))


def test_the_client_has_each_write_at_once(tmp_path: Path) -> None:
    """It may send it while the next one is encoded; a save over a link of 500 MB/s took a fifth longer without."""
    fs: Any = PlainFilesystem(skip_instance_cache=True)
    filesystem = FsspecFilesystem("it", fs, str(tmp_path), options={}, part_nbytes=1 << 20, is_object_store=False)
    sent: list[int] = []

    def hook(name: str, call: Any, *arguments: Any) -> Any:
        if name == "write":
            sent.append(len(arguments[-1]))
        return carry_out(name, call, *arguments)

    with hooked(hook), filesystem.open_output("__0_0_x.distcp") as stream:
        stream.write(b"first")
        assert sent == [5]
        stream.write(bytes(3 << 20))
        assert sent == [5, 3 << 20]


class RenamingFilesystem(PlainFilesystem):
    """It has nothing but `rename`, so fsspec's `mv` copies."""

    protocol = "plain-renaming"

    def rename(self, path1: str, path2: str, **_: Any) -> None:
        self.hook("rename", os.rename, path1, path2)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.hook("copy", shutil.copyfile, path1, path2)


@pytest.mark.parametrize(("chain", "expected"), [("", "rename"), ("dir", None), ("simplecache", "rename")])
def test_a_method_that_is_not_handed_on_does_not_count(chain: str, expected: str | None, tmp_path: Path) -> None:
    """`dir::` hands on `mv` and not `rename`: that of fsspec, called there, would copy."""
    fs: Any = RenamingFilesystem(skip_instance_cache=True)
    path = str(tmp_path)
    if chain == "dir":
        fs, path = DirFileSystem(path, fs), ""
    elif chain == "simplecache":
        fs = SimpleCacheFileSystem(fs=fs)
    filesystem = FsspecFilesystem("it", fs, path, options={}, part_nbytes=1 << 20, is_object_store=False)
    calls: list[str] = []

    def hook(name: str, call: Any, *arguments: Any) -> Any:
        calls.append(name)
        return carry_out(name, call, *arguments)

    (tmp_path / ".metadata").write_bytes(b"first")
    with warnings.catch_warnings(record=True) as caught, hooked(hook):
        warnings.simplefilter("always")
        filesystem.publish(".metadata", b"second")
    assert "copy" not in calls
    assert ("rename" in calls) == (expected == "rename")
    assert [GAP in str(one.message) for one in caught] == ([] if expected else [True])
    assert (tmp_path / ".metadata").read_bytes() == b"second"


def test_the_move_of_sftp_replaces() -> None:
    class SFTPFileSystem(AbstractFileSystem):  # type: ignore[misc]
        __module__ = "fsspec.implementations.sftp"

        def mv(self, old: str, new: str) -> None:
            raise AssertionError

    assert Moves(SFTPFileSystem()).can_replace
    assert Moves(DirFileSystem("/x", SFTPFileSystem())).can_replace == DIR_HANDS_ON
    assert not Moves(DirFileSystem("/x", MovingFilesystem())).can_replace


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_what_is_not_atomic_warns(protocol: str, tmp_path: Path) -> None:
    filesystem = open_filesystem(f"{protocol}://{tmp_path}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filesystem.publish(".metadata", b"first")
        assert not caught
        filesystem.publish(".metadata", b"second")
    assert [GAP in str(one.message) for one in caught] == ([] if protocol in ATOMIC else [True])
    assert [file.name for file in tmp_path.iterdir()] == [".metadata"]
    assert (tmp_path / ".metadata").read_bytes() == b"second"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_another_save_is_faster(protocol: str, tmp_path: Path) -> None:
    """It publishes between the check and the move. Only a move that refuses finds out."""
    filesystem = open_filesystem(f"{protocol}://{tmp_path}")

    def hook(name: str, call: Any, *arguments: Any) -> Any:
        if name == "mv":
            (tmp_path / ".metadata").write_bytes(b"first")
        return carry_out(name, call, *arguments)

    if protocol in ("plain-refusing", "plain-silent", "plain-vague", "plain-replace"):
        with hooked(hook), pytest.raises(ConcurrentSaveError):
            filesystem.publish(".metadata", b"second", overwrite=False)
        assert (tmp_path / ".metadata").read_bytes() == b"first"
        assert [file.name for file in tmp_path.iterdir()] == [".metadata"]
    else:
        filesystem.publish(".metadata", b"second", overwrite=False)
        with pytest.raises(ConcurrentSaveError):
            filesystem.publish(".metadata", b"third", overwrite=False)
        assert (tmp_path / ".metadata").read_bytes() == b"second"


class SMBOSError(OSError):
    """As smbprotocol has it: errno 2, but no FileNotFoundError."""


class ResourceNotFoundError(Exception):
    """As azure.core has it."""


class SFTPError(Exception):
    """As asyncssh has it."""


class SFTPNoSuchFile(SFTPError):
    """As asyncssh has it."""


class ClientResponseError(Exception):
    """As aiohttp has it."""

    status = 404


MISSING = [
    SMBOSError(2, "No such file"),
    ResourceNotFoundError("The specified blob does not exist."),
    SFTPNoSuchFile("No such file"),
    ClientResponseError("Not Found"),
]


@pytest.mark.parametrize("error", MISSING, ids=lambda error: type(error).__name__)
def test_not_found_in_many_words(error: Exception, tmp_path: Path) -> None:
    assert is_not_found(error)
    assert not any(map(is_not_found, (SMBOSError(13, "denied"), SFTPError("broken"), ModuleNotFoundError("x"))))
    filesystem = open_filesystem(f"plain://{tmp_path}")

    def hook(name: str, call: Any, *arguments: Any) -> Any:
        raise error

    with hooked(hook):
        assert filesystem.file_nbytes("x") is None
        assert filesystem.list_files() == []
        filesystem.remove(["x"])
        with pytest.raises(StorageError) as caught:
            filesystem.read("x", 0, 1)
        assert caught.value.errno == 2


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        ({"modify": "20261125133456"}, 1795613696.0),
        ({"modify": "20261125133456.25"}, 1795613696.25),
        ({"mtime": 12.5}, 12.5),
        ({"LastModified": "2026-11-25T13:34:56Z"}, 1795613696.0),
        ({"modify": "yesterday"}, None),
        ({"size": 3}, None),
    ],
)
def test_times_in_many_words(found: dict[str, Any], seconds: float | None) -> None:
    assert modified_seconds(found) == seconds


def test_a_client_of_one_connection_is_used_by_one_thread_at_a_time(tmp_path: Path) -> None:
    fs: Any = MovingFilesystem(skip_instance_cache=True)
    filesystem = FsspecFilesystem(
        "it", fs, str(tmp_path), options={}, part_nbytes=1 << 20, is_object_store=False, one_at_a_time=True
    )
    inside: list[int] = []
    most = 0

    def hook(name: str, call: Any, *arguments: Any) -> Any:
        nonlocal most
        inside.append(threading.get_ident())
        most = max(most, len(set(inside)))
        time.sleep(0.001)
        try:
            return carry_out(name, call, *arguments)
        finally:
            inside.remove(threading.get_ident())

    def use(number: int) -> None:
        stream = filesystem.open_output(f"file-{number}")
        stream.write(b"x")
        stream.close()
        filesystem.publish(f"small-{number}", b"y")
        assert filesystem.read_all(f"small-{number}", limit_nbytes=9) == b"y"
        filesystem.remove([f"file-{number}"])

    with hooked(hook), ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(16)))
    assert most == 1


def test_what_is_gone_was_removed_whatever_the_client_says(tmp_path: Path) -> None:
    filesystem = open_filesystem(f"plain-moving://{tmp_path}")
    filesystem.publish("kept", b"x")

    def hook(name: str, call: Any, *arguments: Any) -> Any:
        if name == "rm":
            raise RuntimeError("550 No such file or directory.")
        return carry_out(name, call, *arguments)

    with hooked(hook):
        filesystem.remove(["missing"])
        with pytest.raises(StorageError, match="550"):
            filesystem.remove(["kept"])


def test_a_store_lists_all_at_once_also_behind_a_cache() -> None:
    class Store(AsyncFileSystem):
        async def _find(self, path: str, **more: Any) -> list[str]:
            return []

    store, plain = Store(), AsyncFileSystem()
    for chained in (lambda fs: fs, lambda fs: DirFileSystem("a", fs), lambda fs: SimpleCacheFileSystem(fs=fs)):
        assert _finds_by_itself(chained(store)) and not _finds_by_itself(chained(plain))


@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_a_folder_that_is_not_listed_is_not_passed_over(chain: str, tmp_path: Path) -> None:
    """Fsspec leaves it out: a run would have no steps, and begin anew over those that it has."""
    for name in ("step-1/a", "step-2/deep/b", "c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    filesystem = open_filesystem(f"{chain}plain://{tmp_path}")
    failing = ""

    def hook(name: str, call: Any, *arguments: Any) -> Any:
        if name == "ls" and str(arguments[0]).rstrip("/") == f"{tmp_path}{failing}":
            raise OSError(errno.EIO, "connection reset")
        return carry_out(name, call, *arguments)

    with hooked(hook):
        with pytest.raises(StorageError, match="connection reset"):
            filesystem.list_below()
        for failing, left in (("/step-1", ["c", "step-2/deep/b"]), ("/step-2/deep", ["c", "step-1/a"])):
            below = filesystem.list_below()
            assert sorted(file.name for file in below.files) == left
            assert [*below.failed] == [failing[1:]] and "connection reset" in str(below.failed[failing[1:]])
        failing = "/none"
        assert not filesystem.list_below().failed
    shutil.rmtree(tmp_path)
    assert filesystem.list_below().files == []
