"""SFTP and SMB: the suite on real servers of OpenSSH and Samba, and what is their own.

They can't show: Windows' own server, latency, Kerberos, shares of a distributed file system.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import ConcurrentSaveError, ConfigurationError, StorageError
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.file_servers.client import ConnectionLostError, ServerClient
from dcp_nvcomp.storage.open import open_filesystem
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer
from tests.servers.wire import Wire

from .file_servers import PART_NBYTES, connections, made, opened
from .suite import FilesystemSuite, Place, write_file

FileServer = SftpServer | SmbServer

SECRET = "S3cretS3cretS3cret"


@pytest.mark.ci
class TestSuite(FilesystemSuite):
    @pytest.fixture
    def place(self, store: Place) -> Place:
        return store


@contextlib.contextmanager
def within(filesystem: Filesystem, seconds: float) -> Iterator[None]:
    """Give it less time for a while: for a login a busy machine may need more."""
    client: ServerClient = filesystem._client  # type: ignore[attr-defined]
    before, client.deadline_seconds, client.removal_seconds = client.deadline_seconds, seconds, seconds
    yield
    client.deadline_seconds = client.removal_seconds = before


def through(wire: Wire, server: FileServer, store: Place) -> Place:
    """Return the same place behind a wire."""
    url, options = store
    known = {"known_hosts": str(server.known_at(wire.port))} if isinstance(server, SftpServer) else {}
    return url.replace(f":{server.port}/", f":{wire.port}/"), {**options, **known}


# --- connections that break ------------------------------------------------------------------------------------------


def upload(filesystem: Filesystem) -> None:
    data = bytes(range(256)) * (3 * PART_NBYTES // 256) + b"end"
    write_file(filesystem, "data", data)
    assert filesystem.read_all("data", limit_nbytes=1 << 30) == data


def publish_twice(filesystem: Filesystem) -> None:
    for data in (b"first", b"second"):
        filesystem.publish(".metadata", data)
    assert filesystem.read_all(".metadata", limit_nbytes=100) == b"second"


def publish_new(filesystem: Filesystem) -> None:
    filesystem.publish(".metadata", b"only", overwrite=False)
    assert filesystem.read_all(".metadata", limit_nbytes=100) == b"only"


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
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("work", [upload, publish_twice, publish_new, replace_file, names_and_times])
def test_whichever_connection_is_cut_all_goes_on(
    server: FileServer, store: Place, work: Callable[[Filesystem], None], answered: bool
) -> None:
    """Each question in turn is lost, or its answer: what was done is found, what was not is done, nothing is left."""
    with Wire(server.port) as wire:
        place = through(wire, server, store)
        count = 1
        at = 0
        while at < count:
            at += 1
            step = f"step-{at}"
            filesystem = made((f"{place[0]}/{step}", place[1]), default_block_size=PART_NBYTES)
            before = wire.questions
            wire.cut(at, answered=answered)
            work(filesystem)
            if wire.cuts < at:  # there were no so many
                assert at > 3
                break
            count = max(count, at + 1, wire.questions - before if at == 1 else 0)
            leftovers = set(filesystem.list_names()) - {"data", ".metadata"}
            assert not leftovers
            filesystem.close()


@pytest.mark.ci
def test_a_server_that_was_killed_and_started_again(own_server: FileServer) -> None:
    filesystem = made(own_server.place("run"), deadline_seconds=30)
    data = os.urandom(64 << 20)

    def write() -> None:
        stream = filesystem.open_output("data")
        for start in range(0, len(data), 4 << 20):
            stream.write(data[start : start + (4 << 20)])
            if start == 32 << 20:
                half.set()
        stream.close()

    half = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        assert half.wait(30)
        own_server.kill()
        time.sleep(0.5)
        own_server.start()
        writing.result(60)
    assert filesystem.read_all("data", limit_nbytes=len(data)) == data


@pytest.mark.ci
@pytest.mark.parametrize("forgets", ["cut off", "changed", "removed"])
def test_a_server_that_forgot_what_it_had_confirmed(own_server: FileServer, forgets: str) -> None:
    """As after a power failure. It is told: what would be written is not what was."""
    place = own_server.place("run")
    filesystem = made(place, default_block_size=PART_NBYTES)
    stream = filesystem.open_output("data")
    stream.write(b"x" * (8 * PART_NBYTES))
    file = own_server.folder(place[0]) / "data"
    while file.stat().st_size < 5 * PART_NBYTES:
        time.sleep(0.01)
    own_server.kill()
    if forgets == "cut off":
        os.truncate(file, PART_NBYTES)
    elif forgets == "removed":
        file.unlink()
    else:
        with file.open("r+b") as changed:
            changed.seek(1000)
            changed.write(b"y")
    own_server.start()
    with pytest.raises(StorageError, match="confirmed"):
        stream.close()
    stream.abort()
    assert filesystem.list_names() == []


def test_a_loss_that_was_not_noticed_yet(server: FileServer, store: Place) -> None:
    """Another thread still waits on the connection that a server lost, with what it had confirmed."""
    filesystem = made(store, default_block_size=PART_NBYTES)
    stream = filesystem.open_output("data")
    stream.write(b"x" * (5 * PART_NBYTES))
    idle = filesystem._client._idle  # type: ignore[attr-defined]
    file = server.folder(store[0]) / "data"
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
def test_the_end_is_as_durable_as_the_rest(own_server: FileServer) -> None:
    """A lost connection at the very end: all is compared once more."""
    with Wire(own_server.port) as wire:
        place = through(wire, own_server, own_server.place("run"))
        filesystem = made(place)
        stream = filesystem.open_output("data")
        stream.write(b"data")
        wire.break_off()
        threading.Timer(0.5, wire.mend).start()
        stream.close()
        assert filesystem.read_all("data", limit_nbytes=10) == b"data"


@pytest.mark.ci
def test_a_frozen_server_is_told_within_the_deadline(own_server: FileServer) -> None:
    place = own_server.place("run")
    filesystem = made(place, default_block_size=1 << 20)
    filesystem.publish("a", b"x")
    stream = filesystem.open_output("data")
    own_server.freeze()

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
        assert str(own_server.port) in str(caught.value)
        # SMB's client counts in whole seconds; and what was left of a publish is removed in the same time again
        assert time.monotonic() - began < 2 * (2.0 + 1.5)
    own_server.thaw()
    stream.abort()
    filesystem.publish("a", b"z")
    assert filesystem.read("a", 0, 1) == b"z"
    assert filesystem.list_names() == ["a"]


@pytest.mark.ci
def test_a_server_that_is_not_there(own_server: FileServer) -> None:
    filesystem = opened(own_server.place("run"))
    own_server.kill()
    began = time.monotonic()
    with within(filesystem, 1.0), pytest.raises(StorageError) as caught:
        filesystem.publish("a", b"x")
    assert caught.value.errno == errno.ETIMEDOUT and time.monotonic() - began < 4
    assert caught.value.attempts is not None and caught.value.attempts > 1
    assert not caught.value.outcome_unknown  # it had not come to that
    own_server.start()
    filesystem.create_directory()
    filesystem.publish("a", b"x")
    assert filesystem.list_names() == ["a"]


@pytest.mark.ci
@pytest.mark.parametrize(("step", "may_be_done"), [("write", False), ("replace", True)])
def test_a_publish_without_an_answer_may_be_done(
    server: FileServer, store: Place, monkeypatch: pytest.MonkeyPatch, kind: str, step: str, may_be_done: bool
) -> None:
    with Wire(server.port) as wire:
        filesystem = made(through(wire, server, store))
        filesystem.publish("a", b"old")
        done = getattr(connections(kind), step)

        async def without_an_answer(*arguments: Any, **options: Any) -> None:
            await done(*arguments, **options)
            wire.break_off()
            raise ConnectionLostError("the wire is cut")

        with monkeypatch.context() as patch, within(filesystem, 2.0):
            patch.setattr(connections(kind), step, without_an_answer)
            with pytest.raises(StorageError) as caught:
                filesystem.publish("a", b"new")
        assert caught.value.outcome_unknown == may_be_done
        wire.mend()
        assert filesystem.read_all("a", limit_nbytes=10) == (b"new" if may_be_done else b"old")


@pytest.mark.ci
@pytest.mark.parametrize("theirs", [False, True])
def test_a_rename_that_was_interrupted_half_way(
    server: FileServer, store: Place, kind: str, monkeypatch: pytest.MonkeyPatch, theirs: bool
) -> None:
    """The new name is made and then the old one removed. Is the new one ours?"""
    filesystem, folder = opened(store), server.folder(store[0])
    filesystem.create_directory()
    rename, calls = connections(kind).rename_new, []

    async def interrupted(connection: Any, source: str, target: str) -> None:
        calls.append(target)
        if len(calls) > 1:
            return await rename(connection, source, target)
        if theirs:
            (folder / "a").write_bytes(b"theirs")
        else:
            os.link(folder / os.path.basename(source), folder / "a")
        raise ConnectionLostError("the server was killed")

    monkeypatch.setattr(connections(kind), "rename_new", interrupted)
    if theirs:
        with pytest.raises(ConcurrentSaveError):
            filesystem.publish("a", b"ours", overwrite=False)
    else:
        filesystem.publish("a", b"ours", overwrite=False)
    assert filesystem.read_all("a", limit_nbytes=10) == (b"theirs" if theirs else b"ours")
    assert filesystem.list_names() == ["a"]


# --- logins ----------------------------------------------------------------------------------------------------------


def refused(place: Place, **options: Any) -> StorageError:
    filesystem = opened(place, deadline_seconds=30.0, **options)
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        filesystem.list_names()
    assert time.monotonic() - began < 10  # it was not tried again
    assert caught.value.errno == errno.EACCES
    return caught.value


def test_a_wrong_password_is_not_tried_again(store: Place, kind: str) -> None:
    keys = {"client_keys": []} if kind == "sftp" else {}
    error = refused(store, password=SECRET, **keys)
    assert "does not let" in error.message and SECRET not in "".join(traceback.format_exception(error))


@pytest.mark.sftp
def test_a_wrong_key_is_not_tried_again(sftp_server: SftpServer, sftp_store: Place, tmp_path: Path) -> None:
    key = sftp_server.make_key(f"other-{tmp_path.name}")
    assert "client_keys" in refused(sftp_store, client_keys=str(key)).message


@pytest.mark.sftp
def test_a_key_with_a_passphrase(sftp_server: SftpServer, sftp_store: Place, tmp_path: Path) -> None:
    key = sftp_server.make_key(f"locked-{tmp_path.name}", SECRET)
    sftp_server.let_in(key)
    opened(sftp_store, client_keys=str(key), passphrase=SECRET).create_directory()
    wrong = opened(sftp_store, client_keys=str(key), passphrase="not" + SECRET)
    with pytest.raises(StorageError) as caught:
        wrong.list_names()
    assert caught.value.errno == errno.EINVAL
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.sftp
@pytest.mark.parametrize("known", ["nobody", "another"])
def test_an_unknown_host_key_is_not_trusted(
    sftp_server: SftpServer, sftp_store: Place, tmp_path: Path, known: str
) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("")
    if known == "another":
        words = sftp_server.make_key(f"host-{tmp_path.name}").with_suffix(".pub").read_text().split()
        file.write_text(f"[127.0.0.1]:{sftp_server.port} {words[0]} {words[1]}\n")
    error = refused(sftp_store, known_hosts=str(file))
    assert "host key" in error.message and "ssh-keyscan" in error.message
    opened(sftp_store, known_hosts=None).create_directory()  # who wants it so


@pytest.mark.sftp
def test_a_missing_key_file_is_no_missing_checkpoint(sftp_store: Place) -> None:
    filesystem = opened(sftp_store, client_keys="/no/such/key")
    with pytest.raises(StorageError) as caught:
        filesystem.file_nbytes("a")
    assert caught.value.errno == errno.EINVAL and "/no/such/key" in caught.value.message


@pytest.mark.smb
def test_a_missing_share_is_no_missing_checkpoint(smb_store: Place) -> None:
    url, options = smb_store
    filesystem = opened((url.replace("/checkpoints/", "/nothing/"), options))
    with pytest.raises(StorageError, match="no share 'nothing'"):
        filesystem.file_nbytes("a")


def test_a_host_that_nobody_knows_is_told_at_once(kind: str) -> None:
    filesystem = open_filesystem(f"{kind}://no-such-host.invalid/share/run", deadline_seconds=60.0)
    began = time.monotonic()
    with pytest.raises(StorageError, match="no-such-host.invalid"):
        filesystem.list_names()
    assert time.monotonic() - began < 30


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("nbytes", [1, PART_NBYTES - 1, PART_NBYTES, PART_NBYTES + 1, 9 * PART_NBYTES + 7, 40 << 20])
def test_files_about_the_length_of_parts(store: Place, nbytes: int) -> None:
    filesystem = made(store, **({"default_block_size": PART_NBYTES} if nbytes < 40 << 20 else {}))
    data = os.urandom(nbytes)
    write_file(filesystem, "a", data)
    assert filesystem.read_all("a", limit_nbytes=nbytes) == data
    buffer = bytearray(nbytes)
    filesystem.read_into("a", 0, memoryview(buffer))
    assert buffer == data


@pytest.mark.ci
def test_many_threads_at_once(store: Place) -> None:
    filesystem = made(store, default_block_size=PART_NBYTES)
    versions = [os.urandom(2 * PART_NBYTES + number) for number in range(40)]
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda number: write_file(filesystem, f"f{number}", versions[number]), range(40)))
        found = list(pool.map(lambda number: filesystem.read_all(f"f{number}", limit_nbytes=1 << 30), range(40)))
    assert found == versions


@pytest.mark.ci
@pytest.mark.parametrize("name", ["with space", "grüße-ß", "100%25", "a#b", "semi;colon", "[1]", "日本"])
def test_odd_names(store: Place, name: str) -> None:
    filesystem = made((f"{store[0]}/{name}", store[1]))
    filesystem.publish(name, b"x")
    assert filesystem.list_names() == [name]
    assert [file.name for file in opened(store).list_below().files] == [f"{name}/{name}"]
    assert filesystem.read(name, 0, 1) == b"x"


def test_what_is_below(server: FileServer, store: Place) -> None:
    filesystem = made(store)
    folder = server.folder(store[0])
    (folder / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (folder / name).write_bytes(b"1")
    below = filesystem.list_below()
    assert sorted(file.name for file in below.files) == ["a/b/z", "a/y", "x"] and not below.failed
    assert filesystem.list_names() == ["x"]


def test_a_directory_in_the_way(server: FileServer, store: Place) -> None:
    filesystem = made(store)
    (server.folder(store[0]) / "taken").mkdir()
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
    assert (server.folder(store[0]) / "taken").is_dir()


def test_a_file_in_the_way_of_the_directory(server: FileServer, store: Place) -> None:
    server.folder(store[0]).write_bytes(b"x")
    filesystem = opened(store)
    with pytest.raises(StorageError) as caught:
        filesystem.create_directory()
    assert caught.value.errno == errno.ENOTDIR
    assert filesystem.list_names() == [] and filesystem.file_nbytes("a") is None
    with pytest.raises(StorageError):
        filesystem.publish("a", b"x")
    filesystem.remove_directory()
    assert server.folder(store[0]).read_bytes() == b"x"


def test_a_file_of_another_is_never_written_into(server: FileServer, store: Place) -> None:
    filesystem = made(store)
    filesystem.publish("data", b"theirs")
    with pytest.raises(StorageError) as caught:
        filesystem.open_output("data")
    assert caught.value.errno == errno.EEXIST
    assert filesystem.read_all("data", limit_nbytes=10) == b"theirs"


def test_only_an_empty_directory_is_removed(server: FileServer, store: Place) -> None:
    filesystem = made(store)
    filesystem.publish("a", b"x")
    filesystem.remove_directory()
    assert filesystem.list_names() == ["a"]
    filesystem.remove(["a"])
    filesystem.remove_directory()
    assert not server.folder(store[0]).exists()
    filesystem.remove_directory()


@pytest.mark.ci
def test_dropped_streams_hold_nothing(store: Place) -> None:
    filesystem = made(store, default_block_size=PART_NBYTES)
    for number in range(34):
        filesystem.open_output(f"dropped-{number}").write(bytes(2 * PART_NBYTES))
        gc.collect()
    assert len(filesystem.list_names()) == 34


def test_a_read_only_share(kind: str, start: Callable[..., FileServer]) -> None:
    server = start(kind, *(["-R"] if kind == "sftp" else []))
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
        if isinstance(connection, connections("smb")):
            return connection._open(key, "rb", **options)
        return await connection._sftp.open(key, "rb")

    async def end(connection: Any) -> None:
        closed = file.close()
        if closed is not None:
            await closed

    file = client.run("read", name, begin)
    yield
    client.run("read", name, end)


def test_a_file_is_replaced_while_somebody_reads_it(store: Place) -> None:
    filesystem, reader = opened(store), opened(store)
    filesystem.create_directory()
    filesystem.publish("a", b"old")
    with held_open(reader, "a"):
        filesystem.publish("a", b"new")
    assert filesystem.read_all("a", limit_nbytes=10) == b"new"
    assert filesystem.list_names() == ["a"]


@pytest.mark.smb
def test_a_publish_waits_for_readers(smb_store: Place) -> None:
    """Windows replaces no file that any client has open, Samba none that is open on the same connection."""
    filesystem = made(smb_store)
    filesystem.publish("a", b"old")
    with ThreadPoolExecutor(1) as pool:
        with held_open(filesystem, "a"):
            publishing = pool.submit(filesystem.publish, "a", b"new")
            time.sleep(0.5)
            assert not publishing.done()
        publishing.result(20)
    assert filesystem.read_all("a", limit_nbytes=10) == b"new"
    assert filesystem.list_names() == ["a"]


@pytest.mark.smb
def test_a_publish_does_not_wait_longer_than_the_deadline(smb_store: Place) -> None:
    filesystem = made(smb_store)
    filesystem.publish("a", b"old")
    with held_open(filesystem, "a"):
        began = time.monotonic()
        with within(filesystem, 1.0), pytest.raises(StorageError, match="open") as caught:
            filesystem.publish("a", b"new")
        assert 0.5 < time.monotonic() - began < 5
        assert caught.value.errno == errno.EBUSY and not caught.value.outcome_unknown
        assert filesystem.read_all("a", limit_nbytes=10) == b"old"
    assert filesystem.list_names() == ["a"]


def test_a_file_is_removed_while_somebody_reads_it(store: Place) -> None:
    filesystem, reader = opened(store), opened(store)
    filesystem.create_directory()
    filesystem.publish("a", b"old")
    with held_open(reader, "a"):
        filesystem.remove(["a"])
        filesystem.remove(["a"])
        assert filesystem.file_nbytes("a") is None
        with pytest.raises(StorageError) as caught:
            filesystem.read("a", 0, 1)
        assert caught.value.errno == errno.ENOENT
    assert filesystem.list_names() == []


@pytest.mark.smb
def test_a_read_waits_for_an_exclusive_reader(smb_store: Place) -> None:
    """As programs that look for viruses are, and for a moment a save that asks whether a client has it open."""
    filesystem, other = opened(smb_store), opened(smb_store)
    filesystem.create_directory()
    filesystem.publish("a", b"x")
    with ThreadPoolExecutor(1) as pool:
        with held_open(other, "a", share_access=None):
            reading = pool.submit(filesystem.read, "a", 0, 1)
            time.sleep(0.5)
            assert not reading.done()
        assert reading.result(20) == b"x"


@pytest.mark.smb
@pytest.mark.parametrize("option", [{"encrypt": True}, {"require_signing": False}, {"auth_protocol": "ntlm"}])
def test_how_smb_is_protected(smb_store: Place, option: dict[str, Any]) -> None:
    filesystem = made(smb_store, **option)
    data = os.urandom(5 << 20)
    write_file(filesystem, "data", data)
    assert filesystem.read_all("data", limit_nbytes=len(data)) == data


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_forked_process_makes_connections_of_its_own(store: Place) -> None:
    filesystem = opened(store, deadline_seconds=90.0)
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


# --- packages that are not installed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "package"), [("sftp", "asyncssh"), ("ssh", "asyncssh"), ("smb", "smbprotocol")])
def test_a_missing_package(protocol: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import dcp_nvcomp.storage.file_servers as room

    module = "smb" if protocol == "smb" else "sftp"
    monkeypatch.delitem(sys.modules, f"{room.__name__}.{module}", raising=False)
    monkeypatch.delattr(room, module, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] in (package, "smbclient")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'dcp-nvcomp\[{module}\]'"):
        open_filesystem(f"{protocol}://host/share/run")
