"""Local disk: what POSIX promises only to those who ask, durability, exclusive names, no half files."""

from __future__ import annotations

import errno
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import ConcurrentSaveError, StorageError, TruncatedFileError, UnsafePathError
from dcp_nvcomp.storage.open import open_filesystem
from tests.faults import forked

from .files import write_file


def test_a_limit_of_the_process(tmp_path: Path) -> None:
    """As a full disk, where nothing can be mounted: the first write is short, the next one fails."""
    code = f"""if True:
        import resource, signal
        from dcp_nvcomp.errors import StorageError
        from dcp_nvcomp.storage.open import open_filesystem
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        filesystem = open_filesystem({str(tmp_path)!r})
        filesystem.publish(".metadata", b"old")
        stream = filesystem.open_output("large")
        try:
            stream.write(bytes(100_000))
        except StorageError as error:
            print(error.errno, filesystem.file_nbytes("large"))
        stream.abort()
        try:
            filesystem.publish(".metadata", bytes(100_000))
        except StorageError as error:
            print(error.errno, filesystem.list_names(), filesystem.read_all(".metadata", limit_nbytes=10))
    """
    done = forked.execute(code)
    assert done.stdout.splitlines() == [f"{errno.EFBIG} {1 << 16}", f"{errno.EFBIG} ['.metadata'] b'old'"]


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        filesystem = open_filesystem(tmp_path / "outer" / "run")
        filesystem.create_directory()
        write_file(filesystem, "data", b"x")
        filesystem.publish("replaced", b"x")
        filesystem.publish("new", b"x", overwrite=False)
    finally:
        os.umask(previous)
    assert (tmp_path / "outer").stat().st_mode & 0o777 == 0o750
    for name in ("data", "replaced", "new"):
        assert (tmp_path / "outer" / "run" / name).stat().st_mode & 0o777 == 0o640


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record the calls that change the disk, in order, as (call, name); the calls themselves happen."""
    record: list[tuple[str, str]] = []

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(first: Any, *rest: Any) -> Any:
            path = rest[0] if name in ("rename", "link") else first
            path = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else path
            result = call(first, *rest)
            record.append((name, ".tmp" if str(path).endswith(".tmp") else os.path.basename(path)))
            return result

        return recorded

    for name in ("fsync", "rename", "link", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, recording(name, getattr(os, name)))
    return record


def test_order_of_publishing(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    filesystem = open_filesystem(tmp_path, sync_files=False)
    filesystem.publish("x", b"x")
    assert calls == [("fsync", ".tmp"), ("rename", "x"), ("fsync", tmp_path.name)]
    calls.clear()
    filesystem.publish("y", b"y", overwrite=False)
    assert calls == [("fsync", ".tmp"), ("link", "y"), ("unlink", ".tmp"), ("fsync", tmp_path.name)]


def test_order_of_data_files(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    write_file(open_filesystem(tmp_path), "x", b"x")
    assert calls == [("fsync", "x"), ("fsync", tmp_path.name)]
    calls.clear()
    write_file(open_filesystem(tmp_path, sync_files=False), "y", b"y")
    assert calls == []


def test_directories_are_durable_before_a_name_is_published(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    """Whoever made them: scripts make a run's directory themselves, and do not fsync what that is in."""
    (tmp_path / "a").mkdir()
    filesystem = open_filesystem(tmp_path / "a" / "b" / "c")
    filesystem.create_directory()
    calls.clear()
    filesystem.publish("x", b"x")
    assert calls[:4] == [("fsync", ".tmp"), ("fsync", "b"), ("fsync", "a"), ("fsync", tmp_path.name)]
    assert calls[-2:] == [("rename", "x"), ("fsync", "c")]
    assert {name for name, _ in calls[:-2]} == {"fsync"}
    calls.clear()
    filesystem.publish("y", b"y", overwrite=False)  # once is enough
    assert calls == [("fsync", ".tmp"), ("link", "y"), ("unlink", ".tmp"), ("fsync", "c")]


def test_a_parent_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, "may only be searched")
        return real(path, flags, *rest, **options)

    filesystem = open_filesystem(tmp_path / "a")
    filesystem.create_directory()
    monkeypatch.setattr(os, "open", refuse)
    filesystem.publish("x", b"x")
    assert filesystem.read_all("x", limit_nbytes=1) == b"x"


def test_a_link_that_was_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a call whose reply was lost; the second one finds the link that the first one made."""
    real = os.link

    def twice(*arguments: Any) -> None:
        real(*arguments)
        real(*arguments)

    monkeypatch.setattr(os, "link", twice)
    filesystem = open_filesystem(tmp_path)
    filesystem.publish("x", b"x", overwrite=False)
    with pytest.raises(ConcurrentSaveError):
        filesystem.publish("x", b"y", overwrite=False)
    assert filesystem.read_all("x", limit_nbytes=1) == b"x"
    assert filesystem.list_names() == ["x"]


def test_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    filesystem = open_filesystem(tmp_path)
    with pytest.warns(RuntimeWarning, match="only a check"):
        filesystem.publish("x", b"x", overwrite=False)
    with pytest.warns(RuntimeWarning, match="only a check"), pytest.raises(ConcurrentSaveError):
        filesystem.publish("x", b"y", overwrite=False)
    assert filesystem.read_all("x", limit_nbytes=1) == b"x"
    assert filesystem.list_names() == ["x"]


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pread, preadv = os.write, os.pread, os.preadv
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, start: pread(descriptor, min(nbytes, 7), start))
    monkeypatch.setattr(os, "preadv", lambda descriptor, to, start: preadv(descriptor, [to[0][:7]], start))
    filesystem = open_filesystem(tmp_path)
    data = bytes(range(250))
    write_file(filesystem, "a", data)
    filesystem.publish("b", data)
    for name in ("a", "b"):
        assert filesystem.read(name, 3, 250) == data[3:]
        assert filesystem.read_all(name, limit_nbytes=250) == data
        buffer = bytearray(240)
        filesystem.read_into(name, 10, memoryview(buffer))
        assert buffer == data[10:]


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    filesystem = open_filesystem(tmp_path)
    write_file(filesystem, "a", bytes(100))
    assert filesystem.read("a", 0, 100) == bytes(100)
    os.truncate(tmp_path / "a", 50)
    for start in (0, 50, 90):
        with pytest.raises(TruncatedFileError):
            filesystem.read("a", start, 100)
        with pytest.raises(TruncatedFileError):
            filesystem.read_into("a", start, memoryview(bytearray(100 - start)))


def test_a_size_that_is_a_lie_takes_no_memory(tmp_path: Path) -> None:
    filesystem = open_filesystem(tmp_path)
    write_file(filesystem, "a", bytes(100))
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedFileError):
            filesystem.read("a", 0, 1 << 60)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_links_inside_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "run"
    root.mkdir()
    (root / "link").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "nothing")
    (root / "folder").symlink_to(outside)
    filesystem = open_filesystem(root)
    for name in ("link", "dangling", "folder/secret"):
        for use in (
            lambda: filesystem.read(name, 0, 6),
            lambda: filesystem.read_into(name, 0, memoryview(bytearray(6))),
            lambda: filesystem.read_all(name, limit_nbytes=100),
            lambda: filesystem.file_nbytes(name),
        ):
            with pytest.raises(UnsafePathError, match="Symbolic links"):
                use()
    assert filesystem.list_names() == []
    with pytest.raises(StorageError):
        filesystem.open_output("dangling")
    filesystem.publish("link", b"ours")
    assert (outside / "secret").read_bytes() == b"secret"
    assert filesystem.read_all("link", limit_nbytes=100) == b"ours"


def test_a_pipe_does_not_hang_a_load(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    filesystem = open_filesystem(tmp_path)
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match="is not a plain file"):
            filesystem.read(name, 0, 1)
        assert filesystem.file_nbytes(name) is None


def test_descriptors_are_few_and_are_closed(tmp_path: Path) -> None:
    filesystem = open_filesystem(tmp_path, sync_files=False)

    def held() -> int:
        """How many descriptors lead there: other threads of the process open and close theirs meanwhile."""
        found = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path))
        return found

    for number in range(200):
        write_file(filesystem, f"file-{number}", bytes([number]))
    for _ in range(2):
        for number in range(200):
            assert filesystem.read(f"file-{number}", 0, 1) == bytes([number])
        assert filesystem.read_all("file-0", limit_nbytes=1) == b"\0"
    assert 0 < held() <= 64
    filesystem.close()
    assert held() == 0


RACER = """
import os, sys, time
from dcp_nvcomp.errors import ConcurrentSaveError
from dcp_nvcomp.storage.open import open_filesystem
path, meeting, me = sys.argv[1:]
filesystem = open_filesystem(path)
open(f"{meeting}/{me}", "w").close()
while len(os.listdir(meeting)) < 2:
    time.sleep(0.001)
for number in range(100):
    try:
        filesystem.publish(f"file-{number}", me.encode() * 1000, overwrite=False)
        print(number)
    except ConcurrentSaveError:
        pass
"""


def test_one_of_two_processes_wins(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    meeting = str(tmp_path_factory.mktemp("meeting"))
    with ThreadPoolExecutor(2) as pool:
        racers = list(pool.map(lambda me: forked.execute(RACER, str(tmp_path), meeting, me), "ab"))
    assert [racer.returncode for racer in racers] == [0, 0], racers
    won = [set(racer.stdout.split()) for racer in racers]
    assert not won[0] & won[1]
    assert won[0] | won[1] == {str(number) for number in range(100)}
    filesystem = open_filesystem(tmp_path)
    assert filesystem.list_names() == sorted(f"file-{number}" for number in range(100))
    for me, numbers in zip("ab", won, strict=True):
        for number in numbers:
            assert filesystem.read_all(f"file-{number}", limit_nbytes=1000) == me.encode() * 1000


def test_the_time_of_a_disk_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`clean` is to make room there, and asks for it."""

    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    os.utime(tmp_path, (1.0, 1.0))
    assert abs(open_filesystem(tmp_path).now_seconds() - time.time()) < 60
