"""SFTP and SMB: servers that lose, refuse or grant little, and links."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.file_servers.client import ConnectionLostError
from dcp_nvcomp.storage.open import open_filesystem
from tests.servers.smb import SmbServer

from .file_servers import connections, made
from .suite import Place, write_file

# --- a server that loses ---------------------------------------------------------------------------------------------


def published(filesystem: Filesystem) -> None:
    filesystem.publish(".metadata", b"new", overwrite=True)


def published_first(filesystem: Filesystem) -> None:
    filesystem.publish("first", b"new", overwrite=False)


def replaced(filesystem: Filesystem) -> None:
    stream = filesystem.open_replacement(".metadata")
    stream.write(b"new")
    stream.close()


@pytest.mark.parametrize("publish", [published, published_first, replaced])
def test_a_temporary_that_the_server_lost_was_not_published(
    store: Place, server: Any, kind: str, publish: Callable[[Filesystem], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name was not durable when the server died: the rename that was lost with the answer was never done."""
    filesystem, folder = made(store), server.folder(store[0])
    filesystem.publish(".metadata", b"old")

    async def lost(connection: Any, source: str, target: str) -> None:
        (folder / os.path.basename(source)).unlink()
        raise ConnectionLostError("the server died")

    monkeypatch.setattr(connections(kind), "replace", lost)
    monkeypatch.setattr(connections(kind), "rename_new", lost)
    with pytest.raises(StorageError, match="other contents") as caught:
        publish(filesystem)
    assert caught.value.outcome_unknown
    assert filesystem.read_all(".metadata", limit_nbytes=10) == b"old"
    assert filesystem.list_names() == [".metadata"]


def test_what_another_save_published_since_is_told(
    store: Place, server: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename was done, its answer was lost, and another save came before it was looked at."""
    filesystem, folder = made(store), server.folder(store[0])
    replace = connections(kind).replace

    async def done_but_lost(connection: Any, source: str, target: str) -> None:
        await replace(connection, source, target)
        (folder / ".metadata").write_bytes(b"theirs, which is longer")
        raise ConnectionLostError("the wire is cut")

    monkeypatch.setattr(connections(kind), "replace", done_but_lost)
    with pytest.raises(StorageError, match="another save") as caught:
        filesystem.publish(".metadata", b"ours")
    assert caught.value.outcome_unknown
    assert filesystem.read_all(".metadata", limit_nbytes=30) == b"theirs, which is longer"


@pytest.mark.ci
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_directory_that_cannot_be_synced_any_more(
    store: Place, kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could when it was made, so this is no server that never can: what was published may not be durable."""
    filesystem = made(store)
    filesystem.publish(".metadata", b"old")

    def failing(*arguments: Any) -> None:
        raise OSError(number, "the disk fails")

    if kind == "sftp":
        import asyncssh

        async def failing_fsync(file: Any) -> None:
            if stat.S_ISDIR((await file.stat()).permissions):
                failing()

        monkeypatch.setattr(asyncssh.SFTPClientFile, "fsync", failing_fsync)
    else:
        from smbprotocol.open import Open

        flush = Open.flush
        monkeypatch.setattr(Open, "flush", lambda file: failing() if file.file_name.endswith("run") else flush(file))
    with pytest.raises(StorageError) as caught:
        filesystem.publish(".metadata", b"new")
    assert caught.value.outcome_unknown or caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert filesystem.read_all(".metadata", limit_nbytes=10) == b"new"


# --- links -----------------------------------------------------------------------------------------------------------


def test_a_file_behind_a_link(store: Place, server: Any) -> None:
    """Whoever reads it follows the link, so whoever looks for it must find it: `clean` takes what has no root."""
    filesystem, folder = made(store), server.folder(store[0])
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes(b"behind a link")
    (folder / ".metadata").symlink_to(elsewhere)
    (folder / "broken").symlink_to(folder / "nowhere")
    assert filesystem.read_all(".metadata", limit_nbytes=100) == b"behind a link"
    assert filesystem.file_nbytes(".metadata") == 13
    assert [(file.name, file.nbytes) for file in filesystem.list_files()] == [(".metadata", 13)]
    assert filesystem.file_nbytes("broken") is None


# --- SMB servers ----------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.smb
@pytest.mark.parametrize(
    "settings",
    [
        ("server smb3 signing algorithms = AES-128-GMAC",),
        ("server smb3 signing algorithms = AES-128-CMAC",),
        ("server smb3 signing algorithms = HMAC-SHA256",),
        ("server max protocol = SMB3_00",),
        ("server max protocol = SMB2_10",),
        ("smb2 max read = 65536", "smb2 max write = 65536"),
        ("server smb encrypt = required",),
        ("smb2 max credits = 8",),
        ("smb2 max credits = 20", "server smb encrypt = required"),
    ],
    ids=lambda settings: settings[0],
)
def test_how_messages_are_signed(start: Callable[..., SmbServer], settings: tuple[str, ...]) -> None:
    """With each algorithm, and few requests at once; the server hangs up on what is signed wrongly."""
    filesystem = made(start("smb", *settings, "server signing = required").place("run"), default_block_size=4 << 20)
    data = os.urandom((9 << 20) + 7)
    write_file(filesystem, "data", data)
    assert filesystem.read_all("data", limit_nbytes=len(data)) == data


@pytest.mark.smb
def test_files_without_the_right_to_execute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samba refuses to open them for that, as smbclient.replace does."""
    missing = SmbServer.missing()
    if missing:
        pytest.skip(missing)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        if not os.geteuid():  # root may do anything
            monkeypatch.setattr(SmbServer, "user", "daemon")
        server = SmbServer(Path(directory), "create mask = 0644", "map archive = no")
        server.start()
        try:
            place = server.place("run")
            if not os.geteuid():
                for folder in (server.folder(place[0]).parent, server.folder(place[0]).parent.parent):
                    shutil.chown(folder, "daemon")
            filesystem = made(place)
            for data in (b"one", b"two"):
                filesystem.publish(".metadata", data)
            assert filesystem.read_all(".metadata", limit_nbytes=10) == b"two"
            assert not (server.folder(place[0]) / ".metadata").stat().st_mode & 0o111
        finally:
            server.stop()


@pytest.mark.smb
def test_a_login_that_needs_a_package_is_not_repeated(smb_store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from smbprotocol.session import Session

    def connect(login: Any) -> None:
        raise ImportError("GSSAPIProxy requires the Python gssapi library")

    monkeypatch.setattr(Session, "connect", connect)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"gssapi library: pip install 'smbprotocol\[kerberos\]'") as caught:
        made(smb_store, auth_protocol="kerberos")
    assert caught.value.errno == errno.EINVAL and time.monotonic() - began < 10


@pytest.mark.sftp
def test_an_option_of_a_wrong_type_is_not_repeated(sftp_store: Place) -> None:
    began = time.monotonic()
    with pytest.raises(StorageError, match="an option of the SSH client can't be used") as caught:
        made(sftp_store, encryption_algs=5)
    assert caught.value.errno == errno.EINVAL and time.monotonic() - began < 10


@pytest.mark.sftp
@pytest.mark.parametrize(
    ("state", "number"), [({"bavail": 0}, errno.ENOSPC), ({"favail": 0}, errno.ENOSPC), ({"flags": 1}, errno.EROFS)]
)
@pytest.mark.parametrize("what", ["create", "write", "make a directory"])
def test_a_failure_without_a_reason_is_explained_by_the_disk(
    sftp_store: Place, what: str, state: dict[str, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSH says "Failure" when its disk is full or read-only."""
    import asyncssh

    filesystem = made(sftp_store)
    statvfs = asyncssh.SFTPClient.statvfs

    async def failing(*arguments: Any, **options: Any) -> Any:
        raise asyncssh.SFTPFailure("Failure")

    async def told(client: Any, path: Any) -> Any:
        found = await statvfs(client, path)
        for name, value in state.items():
            setattr(found, name, value)
        return found

    calls = {"create": "open", "make a directory": "mkdir"}
    if what in calls:
        monkeypatch.setattr(asyncssh.SFTPClient, calls[what], failing)
    else:
        monkeypatch.setattr(asyncssh.SFTPClientFile, "write", failing)
    monkeypatch.setattr(asyncssh.SFTPClient, "statvfs", told)
    below = open_filesystem(f"{sftp_store[0]}/new", storage_options=sftp_store[1])
    with pytest.raises(StorageError) as caught:
        below.create_directory() if what == "make a directory" else write_file(filesystem, "a", b"x")
    assert caught.value.errno == number and "the server's disk is" in str(caught.value)
