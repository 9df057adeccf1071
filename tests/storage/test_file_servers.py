"""SFTP and SMB on real servers of OpenSSH and Samba: connections, logins, readers; and servers that refuse or lose.

They can't show: Windows' own server, latency, Kerberos, shares of a distributed file system.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import ConcurrentSaveError, StorageError
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.file_servers.client import ConnectionLostError, ServerClient
from tests.servers.base import Location
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer
from tests.servers.wire import Wire
from tests.stores.kinds import parameters

from .files import made, opened, write_file

FileServer = SftpServer | SmbServer

PART_NBYTES = 1 << 18
SECRET = "S3cretS3cretS3cret"
SFTP = pytest.mark.parametrize("kind_name", parameters("sftp"), indirect=True)
SMB = pytest.mark.parametrize("kind_name", parameters("smb"), indirect=True)


@pytest.fixture
def connections(kind_name: str) -> Any:
    """The class whose methods ask the server."""
    from dcp_nvcomp.storage.file_servers.sftp import SftpConnection
    from dcp_nvcomp.storage.file_servers.smb import SmbConnection

    return SftpConnection if kind_name == "sftp" else SmbConnection


@contextlib.contextmanager
def within(filesystem: Filesystem, seconds: float) -> Iterator[None]:
    """Give it less time for a while: for a login a busy machine may need more."""
    client: ServerClient = filesystem._client  # type: ignore[attr-defined]
    before, client.deadline_seconds, client.removal_seconds = client.deadline_seconds, seconds, seconds
    yield
    client.deadline_seconds = client.removal_seconds = before


# --- connections that break ------------------------------------------------------------------------------------------


def upload(filesystem: Filesystem) -> None:
    data = bytes(range(256)) * (3 * PART_NBYTES // 256) + b"end"
    write_file(filesystem, "data", data)
    assert filesystem.read_all("data", limit_nbytes=1 << 30) == data


def publish_twice(filesystem: Filesystem) -> None:
    filesystem.publish(".metadata", b"first", overwrite=False)
    filesystem.publish(".metadata", b"second")
    assert filesystem.read_all(".metadata", limit_nbytes=100) == b"second"


def replace_file(filesystem: Filesystem) -> None:
    filesystem.publish("data", b"old")
    stream = filesystem.open_replacement("data")
    stream.write(bytes(2 * PART_NBYTES))
    stream.close()
    assert filesystem.file_nbytes("data") == 2 * PART_NBYTES


def names_and_times(filesystem: Filesystem) -> None:
    filesystem.create_directory()
    filesystem.publish("a", b"x")
    assert abs(filesystem.now_seconds() - time.time()) < 10
    assert filesystem.list_names() == ["a"]
    assert [file.name for file in filesystem.list_below().files] == ["a"]
    assert filesystem.free_nbytes() is not None
    filesystem.remove(["a"])
    assert filesystem.list_names() == []
    filesystem.remove_directory()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("work", "answered"),
    [
        (upload, False),
        *((work, True) for work in (upload, publish_twice, replace_file, names_and_times)),
        *(pytest.param(work, False, marks=pytest.mark.slow) for work in (publish_twice, replace_file, names_and_times)),
    ],
)
def test_whichever_connection_is_cut_all_goes_on(
    kind: FileServer, place: Location, work: Callable[[Filesystem], None], answered: bool
) -> None:
    """Each question in turn is lost, or its answer: what was done is found, what was not is done, nothing is left."""
    with Wire(kind.port) as wire:
        place = kind.through(place, wire.port)
        for at in itertools.count(1):
            filesystem = made(place, below=f"step-{at}", default_block_size=PART_NBYTES)
            wire.cut(at, answered=answered)
            work(filesystem)
            if wire.cuts < at:  # there were no so many
                assert at > 3
                break
            assert not set(filesystem.list_names()) - {"data", ".metadata"}
            filesystem.close()


@pytest.mark.ci
@pytest.mark.parametrize("forgets", ["cut off", "changed", "removed"])
def test_a_server_that_forgot_what_it_had_confirmed(kind: FileServer, place: Location, forgets: str) -> None:
    """As after a power failure. It is reported: what would be written is not what was."""
    filesystem = made(place, default_block_size=PART_NBYTES)
    stream = filesystem.open_output("data")
    stream.write(b"x" * (8 * PART_NBYTES))
    file = kind.folder(place[0]) / "data"
    while file.stat().st_size < 5 * PART_NBYTES:
        time.sleep(0.01)
    kind.kill()
    if forgets == "cut off":
        os.truncate(file, PART_NBYTES)
    elif forgets == "removed":
        file.unlink()
    else:
        with file.open("r+b") as changed:
            changed.seek(1000)
            changed.write(b"y")
    kind.start()
    with pytest.raises(StorageError, match="confirmed"):
        stream.close()
    stream.abort()
    assert filesystem.list_names() == []


def test_a_loss_that_was_not_noticed_yet(kind: FileServer, place: Location) -> None:
    """Another thread still waits on the connection that a server lost, with what it had confirmed."""
    filesystem = made(place, default_block_size=PART_NBYTES)
    stream = filesystem.open_output("data")
    stream.write(b"x" * (5 * PART_NBYTES))
    idle = filesystem._client._idle  # type: ignore[attr-defined]
    file = kind.folder(place[0]) / "data"
    while file.stat().st_size < 4 * PART_NBYTES or not idle:
        time.sleep(0.01)
    held = [idle.pop() for _ in range(len(idle))]
    os.truncate(file, PART_NBYTES)
    stream.write(b"x" * (2 * PART_NBYTES))
    with pytest.raises(StorageError, match="confirmed"):
        stream.close()
    assert all(connection.is_alive for connection in held)
    stream.abort()
    assert filesystem.list_names() == []


@pytest.mark.ci
def test_the_end_is_as_durable_as_the_rest(kind: FileServer, place: Location) -> None:
    """A lost connection at the very end: all is compared once more."""
    with Wire(kind.port) as wire:
        filesystem = made(kind.through(place, wire.port))
        stream = filesystem.open_output("data")
        stream.write(b"data")
        wire.break_off()
        threading.Timer(0.5, wire.mend).start()
        stream.close()
        assert filesystem.read_all("data", limit_nbytes=10) == b"data"


@pytest.mark.ci
def test_a_frozen_server_is_told_within_the_deadline(kind: FileServer, place: Location) -> None:
    filesystem = made(place, default_block_size=1 << 20)
    filesystem.publish("a", b"x")
    stream = filesystem.open_output("data")
    kind.freeze()

    def write() -> None:
        for _ in range(64):
            stream.write(bytes(1 << 20))
        stream.close()

    uses: list[Callable[[], object]] = [lambda: filesystem.read("a", 0, 1), write, filesystem.list_names]
    for use in (*uses, lambda: filesystem.publish("a", b"y")):
        began = time.monotonic()
        with within(filesystem, 2.0), pytest.raises(StorageError) as caught:
            use()
        assert caught.value.errno == errno.ETIMEDOUT
        assert str(kind.port) in str(caught.value)
        # SMB's client counts in whole seconds; and what was left of a publish is removed in the same time again
        assert time.monotonic() - began < 2 * (2.0 + 1.5)
    kind.thaw()
    stream.abort()
    filesystem.publish("a", b"z")
    assert filesystem.read("a", 0, 1) == b"z"
    assert filesystem.list_names() == ["a"]


@pytest.mark.ci
def test_a_server_that_is_not_there(kind: FileServer, place: Location) -> None:
    filesystem = opened(place)
    kind.kill()
    began = time.monotonic()
    with within(filesystem, 1.0), pytest.raises(StorageError) as caught:
        filesystem.publish("a", b"x")
    assert caught.value.errno == errno.ETIMEDOUT and time.monotonic() - began < 4
    assert caught.value.attempts is not None and caught.value.attempts > 1
    assert not caught.value.outcome_unknown  # it had not come to that
    kind.start()
    filesystem.create_directory()
    filesystem.publish("a", b"x")
    assert filesystem.list_names() == ["a"]


@pytest.mark.ci
@pytest.mark.parametrize(("step", "may_be_done"), [("write", False), ("replace", True)])
def test_a_publish_without_an_answer_may_be_done(
    kind: FileServer, place: Location, connections: Any, monkeypatch: pytest.MonkeyPatch, step: str, may_be_done: bool
) -> None:
    with Wire(kind.port) as wire:
        filesystem = made(kind.through(place, wire.port))
        filesystem.publish("a", b"old")
        done = getattr(connections, step)

        async def without_an_answer(*arguments: Any, **options: Any) -> None:
            await done(*arguments, **options)
            wire.break_off()
            raise ConnectionLostError("the wire is cut")

        with monkeypatch.context() as patch, within(filesystem, 2.0):
            patch.setattr(connections, step, without_an_answer)
            with pytest.raises(StorageError) as caught:
                filesystem.publish("a", b"new")
        assert caught.value.outcome_unknown == may_be_done
        wire.mend()
        assert filesystem.read_all("a", limit_nbytes=10) == (b"new" if may_be_done else b"old")


@pytest.mark.ci
@pytest.mark.parametrize("theirs", [False, True])
def test_a_rename_that_was_interrupted_half_way(
    kind: FileServer, place: Location, connections: Any, monkeypatch: pytest.MonkeyPatch, theirs: bool
) -> None:
    """The new name is made and then the old one removed. Is the new one ours?"""
    filesystem, folder = made(place), kind.folder(place[0])
    rename, calls = connections.rename_new, []

    async def interrupted(connection: Any, source: str, target: str) -> None:
        calls.append(target)
        if len(calls) > 1:
            return await rename(connection, source, target)
        if theirs:
            (folder / "a").write_bytes(b"theirs")
        else:
            os.link(folder / os.path.basename(source), folder / "a")
        raise ConnectionLostError("the server was killed")

    monkeypatch.setattr(connections, "rename_new", interrupted)
    if theirs:
        with pytest.raises(ConcurrentSaveError):
            filesystem.publish("a", b"ours", overwrite=False)
    else:
        filesystem.publish("a", b"ours", overwrite=False)
    assert filesystem.read_all("a", limit_nbytes=10) == (b"theirs" if theirs else b"ours")
    assert filesystem.list_names() == ["a"]


# --- logins ----------------------------------------------------------------------------------------------------------


def _known_host(kind: SftpServer, folder: Path) -> dict[str, Any]:
    """Another key than the server's."""
    words = kind.make_key(f"host-{folder.name}").with_suffix(".pub").read_text().split()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{kind.port} {words[0]} {words[1]}\n")
    return {"known_hosts": str(folder / "known_hosts")}


def _locked_key(kind: SftpServer, folder: Path, passphrase: str) -> dict[str, Any]:
    key = kind.make_key(f"locked-{folder.name}", SECRET)
    kind.let_in(key)
    return {"client_keys": str(key), "passphrase": passphrase}


_LOGINS: dict[str, tuple[str, Callable[[Any, Path], dict[str, Any]], int, str]] = {
    "wrong_password": ("smb", lambda kind, _: {"password": SECRET}, errno.EACCES, "does not let"),
    "wrong_password_without_keys": (
        *("sftp", lambda kind, _: {"password": SECRET, "client_keys": []}, errno.EACCES, "does not let"),
    ),
    "wrong_key": ("sftp", lambda kind, _: {"client_keys": str(kind.make_key("other"))}, errno.EACCES, "client_keys"),
    "wrong_passphrase": ("sftp", lambda kind, folder: _locked_key(kind, folder, "not" + SECRET), errno.EINVAL, ""),
    "host_not_known": ("sftp", lambda kind, _: {"known_hosts": os.devnull}, errno.EACCES, "host key.*ssh-keyscan"),
    "host_that_is_another": ("sftp", _known_host, errno.EACCES, "host key.*ssh-keyscan"),
    "no_such_key": ("sftp", lambda kind, _: {"client_keys": "/no/such/key"}, errno.EINVAL, "/no/such/key"),
    "wrong_type": (
        "sftp",
        lambda kind, _: {"encryption_algs": 5},
        errno.EINVAL,
        "an option of the SSH client can't be",
    ),
    "no_package": (
        *("smb", lambda kind, _: {"auth_protocol": "kerberos"}, errno.EINVAL),
        r"gssapi library: pip install 'smbprotocol\[kerberos\]'",
    ),
}


@pytest.mark.parametrize(
    ("kind_name", "options", "number", "words"),
    [pytest.param(*row, marks=getattr(pytest.mark, row[0]), id=name) for name, row in _LOGINS.items()],
    indirect=["kind_name"],
)
def test_a_login_that_is_refused_is_not_tried_again(
    kind: Any,
    place: Location,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Callable[[Any, Path], dict[str, Any]],
    number: int,
    words: str,
) -> None:
    given = options(kind, tmp_path)
    if "auth_protocol" in given:
        from smbprotocol.session import Session

        def connect(login: Any) -> None:
            raise ImportError("GSSAPIProxy requires the Python gssapi library")

        monkeypatch.setattr(Session, "connect", connect)
    filesystem = opened(place, **given)
    began = time.monotonic()
    with pytest.raises(StorageError, match=f"(?s){words}") as caught:
        filesystem.file_nbytes("a")
    assert time.monotonic() - began < 20
    assert caught.value.errno == number, caught.value
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@SFTP
def test_logins_that_work(kind: SftpServer, place: Location, tmp_path: Path) -> None:
    opened(place, **_locked_key(kind, tmp_path, SECRET)).create_directory()
    opened(place, known_hosts=None).create_directory()  # whichever host it is


@SMB
def test_a_missing_share_is_no_missing_checkpoint(place: Location) -> None:
    url, options = place
    with pytest.raises(StorageError, match="no share 'nothing'"):
        opened((url.replace("/checkpoints/", "/nothing/"), options)).file_nbytes("a")


def test_an_unknown_host_is_reported_at_once(kind_name: str) -> None:
    filesystem = opened((f"{kind_name}://no-such-host.invalid/share/run", {}))
    began = time.monotonic()
    with pytest.raises(StorageError, match="no-such-host.invalid"):
        filesystem.list_names()
    assert time.monotonic() - began < 30


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_read_only_share(kind_name: str, start: Callable[..., FileServer]) -> None:
    server = start(kind_name, *(["-R"] if kind_name == "sftp" else []))
    url, options = server.place("run")
    folder = server.folder(url)
    folder.mkdir()
    (folder / "a").write_bytes(b"x")
    if isinstance(server, SmbServer):
        url = url.replace(f"/{server.share}/", f"/{server.read_only_share}/")
    filesystem = opened((url, options))
    assert filesystem.read("a", 0, 1) == b"x" and filesystem.list_names() == ["a"]
    assert abs(filesystem.now_seconds() - time.time()) < 10
    for use in (
        lambda: filesystem.publish("a", b"y"),
        lambda: filesystem.open_output("b"),
        lambda: filesystem.remove(["a"]),
        lambda: opened((f"{url}/new", options)).create_directory(),
    ):
        began = time.monotonic()
        with pytest.raises(StorageError) as caught:
            use()
        assert caught.value.errno in (errno.EACCES, errno.EROFS), caught.value
        assert not caught.value.outcome_unknown and time.monotonic() - began < 5
    assert (folder / "a").read_bytes() == b"x"


@pytest.mark.sftp
def test_a_server_without_openssh_s_extensions(start: Callable[..., SftpServer]) -> None:
    server = start("sftp", "-P posix-rename,fsync,statvfs,limits")
    filesystem = made(server.place("run"))
    assert filesystem.free_nbytes() is None
    data = os.urandom(1 << 20)
    write_file(filesystem, "data", data)
    assert filesystem.read_all("data", limit_nbytes=1 << 20) == data
    filesystem.publish("a", b"x")
    with pytest.raises(StorageError, match="posix-rename") as caught:
        filesystem.publish("a", b"y")
    assert caught.value.errno == errno.ENOTSUP and not caught.value.outcome_unknown
    assert filesystem.read("a", 0, 1) == b"x" and filesystem.list_names() == ["a", "data"]


# --- readers that have a file open -----------------------------------------------------------------------------------


@contextlib.contextmanager
def held_open(filesystem: Filesystem, name: str, **options: Any) -> Iterator[None]:
    """Have a file open to be read, as a slow reader, on the connection that the filesystem uses next."""
    client: ServerClient = filesystem._client  # type: ignore[attr-defined]
    key = filesystem._key(name)  # type: ignore[attr-defined]

    async def begin(connection: Any) -> Any:
        if hasattr(connection, "_sftp"):
            return await connection._sftp.open(key, "rb")
        return connection._open(key, "rb", **options)

    async def end(connection: Any) -> None:
        closed = file.close()
        if closed is not None:
            await closed

    file = client.run("read", name, begin)
    yield
    client.run("read", name, end)


def test_a_file_is_replaced_and_removed_while_another_reads_it(place: Location) -> None:
    filesystem, reader = made(place), opened(place)
    filesystem.publish("a", b"old")
    with held_open(reader, "a"):
        filesystem.publish("a", b"new")
    assert filesystem.read_all("a", limit_nbytes=10) == b"new"
    assert filesystem.list_names() == ["a"]
    with held_open(reader, "a"):
        filesystem.remove(["a"])
        filesystem.remove(["a"])
        assert filesystem.file_nbytes("a") is None
        with pytest.raises(StorageError) as caught:
            filesystem.read("a", 0, 1)
        assert caught.value.errno == errno.ENOENT
    assert filesystem.list_names() == []


@SMB
def test_a_file_that_is_replaced_once_it_is_open_is_read_whole(
    place: Location, connections: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, other = made(place), opened(place)
    reading.publish(".metadata", b"a" * 1000)
    real = connections._open

    def then_replaced(self: Any, path: str, mode: str, **options: Any) -> Any:
        file = real(self, path, mode, **options)
        if mode == "rb":
            monkeypatch.setattr(connections, "_open", real)
            other.publish(".metadata", b"b" * 10)
        return file

    monkeypatch.setattr(connections, "_open", then_replaced)
    assert reading.read_all(".metadata", limit_nbytes=1 << 20) == b"a" * 1000
    assert reading.read_all(".metadata", limit_nbytes=1 << 20) == b"b" * 10


@SMB
def test_a_name_that_is_not_found_is_looked_for_again(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samba does not find a name while it is being replaced: once in 500 looks, where that is all that happens."""
    import smbclient
    from smbprotocol.exceptions import SMBOSError
    from smbprotocol.header import NtStatus

    filesystem = made(place)
    filesystem.publish(".metadata", b"here")

    def not_found_at_first(name: str) -> None:
        real, calls = getattr(smbclient, name), itertools.count()

        def at_first_not(path: str, *arguments: Any, **options: Any) -> Any:
            if next(calls) == 0:
                raise SMBOSError(NtStatus.STATUS_OBJECT_NAME_NOT_FOUND, path)
            return real(path, *arguments, **options)

        monkeypatch.setattr(smbclient, name, at_first_not)

    not_found_at_first("open_file")
    assert filesystem.read_all(".metadata", limit_nbytes=10) == b"here"
    not_found_at_first("stat")
    assert filesystem.file_nbytes(".metadata") == 4
    filesystem.remove([".metadata"])
    assert filesystem.file_nbytes(".metadata") is None


@SMB
def test_a_publish_waits_for_readers(place: Location) -> None:
    """Windows replaces no file that any client has open, Samba none that is open on the same connection."""
    filesystem = made(place)
    filesystem.publish("a", b"old")
    with ThreadPoolExecutor(1) as pool:
        with held_open(filesystem, "a"):
            publishing = pool.submit(filesystem.publish, "a", b"new")
            time.sleep(0.5)
            assert not publishing.done()
        publishing.result(20)
    assert filesystem.read_all("a", limit_nbytes=10) == b"new"
    assert filesystem.list_names() == ["a"]


@SMB
def test_a_publish_does_not_wait_longer_than_the_deadline(place: Location) -> None:
    filesystem = made(place)
    filesystem.publish("a", b"old")
    with held_open(filesystem, "a"):
        began = time.monotonic()
        with within(filesystem, 3.0), pytest.raises(StorageError, match="open") as caught:
            filesystem.publish("a", b"new")
        assert time.monotonic() - began < 9 and caught.value.attempts > 1  # pauses have a random length
        assert caught.value.errno == errno.EBUSY and not caught.value.outcome_unknown
        assert filesystem.read_all("a", limit_nbytes=10) == b"old"
    assert filesystem.list_names() == ["a"]


@SMB
def test_a_read_waits_for_an_exclusive_reader(place: Location) -> None:
    """As programs that look for viruses are, and for a moment a save that asks whether a client has it open."""
    filesystem, other = made(place), opened(place)
    filesystem.publish("a", b"x")
    with ThreadPoolExecutor(1) as pool:
        with held_open(other, "a", share_access=None):
            reading = pool.submit(filesystem.read, "a", 0, 1)
            time.sleep(0.5)
            assert not reading.done()
        assert reading.result(20) == b"x"


@SMB
def test_how_smb_is_protected(place: Location) -> None:
    data = os.urandom(5 << 20)
    for number, option in enumerate(({"encrypt": True}, {"require_signing": False}, {"auth_protocol": "ntlm"})):
        filesystem = made(place, **option)
        write_file(filesystem, f"data-{number}", data)
        assert filesystem.read_all(f"data-{number}", limit_nbytes=len(data)) == data


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_forked_process_makes_connections_of_its_own(place: Location) -> None:
    filesystem = opened(place, deadline_seconds=90.0)
    client: ServerClient = filesystem._client  # type: ignore[attr-defined]
    filesystem.create_directory()
    filesystem.publish("parents", b"parent")
    before = list(client._idle)
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            began = time.monotonic()
            assert filesystem.read_all("parents", limit_nbytes=10) == b"parent"
            filesystem.publish("child", b"child")
            filesystem.close()
            assert time.monotonic() - began < 25  # on the parent's it would wait for answers first, for 30 s
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    filesystem.publish("parents", b"again")
    assert client._idle == before
    assert filesystem.list_names() == ["child", "parents"]


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
    kind: FileServer,
    place: Location,
    connections: Any,
    publish: Callable[[Filesystem], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name was not durable when the server died: the rename that was lost with the answer was never done."""
    filesystem, folder = made(place), kind.folder(place[0])
    filesystem.publish(".metadata", b"old")

    async def lost(connection: Any, source: str, target: str) -> None:
        (folder / os.path.basename(source)).unlink()
        raise ConnectionLostError("the server died")

    monkeypatch.setattr(connections, "replace", lost)
    monkeypatch.setattr(connections, "rename_new", lost)
    with pytest.raises(StorageError, match="other contents") as caught:
        publish(filesystem)
    assert caught.value.outcome_unknown
    assert filesystem.read_all(".metadata", limit_nbytes=10) == b"old"
    assert filesystem.list_names() == [".metadata"]


def test_what_another_save_published_since_is_told(
    kind: FileServer, place: Location, connections: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename was done, its answer was lost, and another save came before it was looked at."""
    filesystem, folder = made(place), kind.folder(place[0])
    replace = connections.replace

    async def done_but_lost(connection: Any, source: str, target: str) -> None:
        await replace(connection, source, target)
        (folder / ".metadata").write_bytes(b"theirs, which is longer")
        raise ConnectionLostError("the wire is cut")

    monkeypatch.setattr(connections, "replace", done_but_lost)
    with pytest.raises(StorageError, match="another save") as caught:
        filesystem.publish(".metadata", b"ours")
    assert caught.value.outcome_unknown
    assert filesystem.read_all(".metadata", limit_nbytes=30) == b"theirs, which is longer"


@pytest.mark.ci
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_directory_that_cannot_be_synced_any_more(
    place: Location, kind_name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could when it was made, so this is no server that never can: what was published may not be durable."""
    filesystem = made(place, deadline_seconds=6.0)
    filesystem.publish(".metadata", b"old")

    def failing(*arguments: Any) -> None:
        raise OSError(number, "the disk fails")

    if kind_name == "sftp":
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


# --- SMB servers ----------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.smb
@pytest.mark.parametrize(
    "settings",
    [
        ("server max protocol = SMB2_10",),
        ("smb2 max read = 65536", "smb2 max write = 65536"),
        ("smb2 max credits = 20", "server smb encrypt = required"),
    ],
    ids=lambda settings: settings[0],
)
def test_servers_that_grant_little(start: Callable[..., SmbServer], settings: tuple[str, ...]) -> None:
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


@SFTP
@pytest.mark.parametrize("what", ["create", "write", "make a directory"])
def test_a_failure_without_a_reason_is_explained_by_the_disk(
    place: Location, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSH says "Failure" when its disk is full or read-only."""
    import asyncssh

    filesystem, below = made(place), opened(place, below="new")
    statvfs, state = asyncssh.SFTPClient.statvfs, dict[str, int]()

    async def failing(*arguments: Any, **options: Any) -> Any:
        raise asyncssh.SFTPFailure("Failure")

    async def reported(client: Any, path: Any) -> Any:
        found = await statvfs(client, path)
        for name, value in state.items():
            setattr(found, name, value)
        return found

    if what == "write":
        monkeypatch.setattr(asyncssh.SFTPClientFile, "write", failing)
    else:
        monkeypatch.setattr(asyncssh.SFTPClient, "open" if what == "create" else "mkdir", failing)
    monkeypatch.setattr(asyncssh.SFTPClient, "statvfs", reported)
    for name, value, number in (("bavail", 0, errno.ENOSPC), ("favail", 0, errno.ENOSPC), ("flags", 1, errno.EROFS)):
        state.clear()
        state[name] = value
        with pytest.raises(StorageError, match="the server's disk is") as caught:
            below.create_directory() if what == "make a directory" else write_file(filesystem, f"a{name}", b"x")
        assert caught.value.errno == number
