"""Tests of every Filesystem; a class per implementation inherits them and says where its files are."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_nvcomp.errors import ConcurrentSaveError, FormatError, StorageError, TruncatedFileError, UnsafePathError
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

Place = tuple[str, dict[str, Any]]

UNSAFE_NAMES = [
    "",
    "/x",
    "..",
    "../x",
    "a/../x",
    "a/..",
    "./x",
    "a//x",
    "a/",
    "a\\x",
    "x\0",
    "x\n",
    "file:x",
    "s3://b/x",
    "memory::x",
    "a::b",
]


def write_file(filesystem: Filesystem, name: str, data: bytes) -> None:
    stream = filesystem.open_output(name)
    stream.write(data)
    stream.close()


class FilesystemSuite:
    """Inherit it and give a fixture `place`: a path below which there is nothing yet, and storage options."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def filesystem(self, place: Place) -> Iterator[Filesystem]:
        path, options = place
        filesystem = open_filesystem(f"{path}/step-1", storage_options=options)
        filesystem.create_directory()
        yield filesystem
        filesystem.close()

    @pytest.fixture
    def another(self, place: Place) -> Callable[[str], Filesystem]:
        """Opens what another process would open."""

        def open_another(folder: str) -> Filesystem:
            return open_filesystem(f"{place[0]}/{folder}", storage_options=place[1])

        return open_another

    def test_ranges_of_a_written_file(self, filesystem: Filesystem) -> None:
        data = bytes(range(256)) * 40
        stream = filesystem.open_output("__0_0_a.distcp")
        stream.write(memoryview(data)[:100])
        stream.write(b"")
        stream.write(data[100:5000])
        stream.write(memoryview(bytearray(data[5000:])).cast("I"))  # any buffer, by its bytes
        stream.close()
        assert filesystem.file_nbytes("__0_0_a.distcp") == len(data)
        for start, stop in [(0, len(data)), (0, 1), (99, 101), (4999, 9000), (len(data) - 1, len(data)), (7, 7)]:
            assert filesystem.read("__0_0_a.distcp", start, stop) == data[start:stop]
            buffer = bytearray(stop - start)
            filesystem.read_into("__0_0_a.distcp", start, memoryview(buffer))
            assert buffer == data[start:stop]
        assert filesystem.read_all("__0_0_a.distcp", limit_nbytes=len(data)) == data

    def test_a_written_buffer_may_be_reused(self, filesystem: Filesystem) -> None:
        buffer = bytearray(1000)
        stream = filesystem.open_output("reused")
        for value in range(10):
            buffer[:] = bytes([value]) * len(buffer)
            stream.write(memoryview(buffer))
        buffer[:] = b"x" * len(buffer)
        stream.close()
        assert filesystem.read("reused", 0, 10_000) == b"".join(bytes([value]) * 1000 for value in range(10))

    def test_empty_file(self, filesystem: Filesystem) -> None:
        write_file(filesystem, "empty", b"")
        assert filesystem.file_nbytes("empty") == 0
        assert filesystem.read_all("empty", limit_nbytes=0) == b""
        assert filesystem.read("empty", 0, 0) == b""
        with pytest.raises(TruncatedFileError):
            filesystem.read("empty", 0, 1)

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 11), (10, 11), (1000, 2000), (0, 1 << 50)])
    def test_a_range_beyond_the_end(self, filesystem: Filesystem, start: int, stop: int) -> None:
        write_file(filesystem, "short", b"0123456789")
        with pytest.raises(TruncatedFileError) as caught:
            filesystem.read("short", start, stop)
        assert caught.value.byte_range == (start, stop)
        assert caught.value.path == filesystem.location("short")
        if stop < 1 << 20:
            with pytest.raises(TruncatedFileError):
                filesystem.read_into("short", start, memoryview(bytearray(stop - start)))

    def test_files_tell_their_size_and_age(self, filesystem: Filesystem) -> None:
        before = filesystem.now_seconds()
        write_file(filesystem, "a", b"123")
        write_file(filesystem, "b", b"")
        after = filesystem.now_seconds()
        files = filesystem.list_files()
        assert [(file.name, file.nbytes) for file in files] == [("a", 3), ("b", 0)]
        for file in files:  # whole seconds are all that some stores tell
            assert file.modified_seconds is not None
            assert before - 1.1 <= file.modified_seconds <= after + 1.1
        assert filesystem.list_uploads() == []
        filesystem.abort_uploads([])

    def test_missing_file(self, filesystem: Filesystem, another: Callable[[str], Filesystem]) -> None:
        for lonely in (filesystem, another("step-that-never-was")):
            assert lonely.file_nbytes("missing") is None
            assert lonely.list_names() == []
            for read in (
                lambda: lonely.read("missing", 0, 1),
                lambda: lonely.read_into("missing", 0, memoryview(bytearray(1))),
                lambda: lonely.read_all("missing", limit_nbytes=1),
            ):
                with pytest.raises(StorageError) as caught:
                    read()
                assert caught.value.errno == errno.ENOENT
                assert caught.value.path == lonely.location("missing")

    def test_read_all_has_a_limit(self, filesystem: Filesystem) -> None:
        filesystem.publish("some", b"0123456789")
        assert filesystem.read_all("some", limit_nbytes=10) == b"0123456789"
        with pytest.raises(FormatError, match="larger than 9"):
            filesystem.read_all("some", limit_nbytes=9)

    def test_names_of_this_directory_only(self, filesystem: Filesystem, another: Callable[[str], Filesystem]) -> None:
        for folder in ("step-10", "step-1/inner", "step"):
            other = another(folder)
            other.create_directory()
            other.publish("not-here", b"x")
        assert filesystem.list_names() == []
        filesystem.publish(".metadata", b"x")
        write_file(filesystem, "b", b"")
        write_file(filesystem, "a", b"x")
        assert filesystem.list_names() == [".metadata", "a", "b"]
        assert filesystem.file_nbytes("inner") is None

    def test_what_others_do_is_seen_at_once(self, filesystem: Filesystem, another: Callable[[str], Filesystem]) -> None:
        other = another("step-1")
        assert (filesystem.list_names(), filesystem.file_nbytes("a")) == ([], None)
        other.publish("a", b"1")
        assert (filesystem.list_names(), filesystem.file_nbytes("a")) == (["a"], 1)
        other.publish("a", b"12")
        assert filesystem.file_nbytes("a") == 2
        assert filesystem.read_all("a", limit_nbytes=2) == b"12"
        other.remove(["a"])
        assert (filesystem.list_names(), filesystem.file_nbytes("a")) == ([], None)

    def test_publish_replaces(self, filesystem: Filesystem) -> None:
        for data in (b"first", b"the second one", b"3"):
            filesystem.publish(".metadata", data)
            assert filesystem.read_all(".metadata", limit_nbytes=100) == data
            assert filesystem.list_names() == [".metadata"]

    def test_publish_without_overwrite(self, filesystem: Filesystem) -> None:
        filesystem.publish(".metadata", b"first", overwrite=False)
        with pytest.raises(ConcurrentSaveError) as caught:
            filesystem.publish(".metadata", b"second", overwrite=False)
        assert caught.value.path == filesystem.location(".metadata")
        assert filesystem.read_all(".metadata", limit_nbytes=100) == b"first"
        assert filesystem.list_names() == [".metadata"]

    def test_publish_is_atomic_for_readers(self, filesystem: Filesystem) -> None:
        versions = [b"a" * 300_000, b"b" * 10, b"c" * 70_000]
        filesystem.publish(".metadata", versions[0])
        done = threading.Event()

        def watch() -> set[bytes]:
            seen = set()
            while not done.is_set():
                seen.add(filesystem.read_all(".metadata", limit_nbytes=1 << 20))
            return seen

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                for count in range(30):
                    filesystem.publish(".metadata", versions[count % 3])
            finally:
                done.set()
            assert watching.result() <= set(versions)

    @pytest.mark.parametrize("nbytes", [0, 10, 40 << 20])
    def test_abort_leaves_nothing(self, filesystem: Filesystem, nbytes: int) -> None:
        stream = filesystem.open_output("aborted")
        stream.write(bytes(nbytes))
        stream.abort()
        stream.abort()
        assert filesystem.list_names() == []
        assert filesystem.file_nbytes("aborted") is None

    @pytest.mark.parametrize("nbytes", [0, 100, 11 << 20])
    def test_a_replacement_takes_the_place_when_it_is_closed(self, filesystem: Filesystem, nbytes: int) -> None:
        for old in (None, b"old"):
            if old is not None:
                write_file(filesystem, "replaced", old)
            for ends in ("abort", "close"):
                stream = filesystem.open_replacement("replaced")
                stream.write(bytes(nbytes))
                assert filesystem.file_nbytes("replaced") == (None if old is None else 3)
                getattr(stream, ends)()
                if ends == "abort":
                    assert filesystem.file_nbytes("replaced") == (None if old is None else 3)
            assert filesystem.read_all("replaced", limit_nbytes=1 << 24) == bytes(nbytes)
            assert filesystem.list_names() == ["replaced"]
            filesystem.remove(["replaced"])

    def test_abort_after_close_does_nothing(self, filesystem: Filesystem) -> None:
        stream = filesystem.open_output("kept")
        stream.write(b"x")
        stream.close()
        stream.abort()
        assert filesystem.file_nbytes("kept") == 1

    def test_remove(self, filesystem: Filesystem, another: Callable[[str], Filesystem]) -> None:
        for name in ("a", "b", "c"):
            write_file(filesystem, name, b"x")
        filesystem.remove(["a", "missing", "c"])
        filesystem.remove([])
        another("step-that-never-was").remove(["a"])
        assert filesystem.list_names() == ["b"]

    @pytest.mark.parametrize("name", UNSAFE_NAMES)
    def test_no_name_leads_outside(self, filesystem: Filesystem, name: str) -> None:
        for use in (
            lambda: filesystem.open_output(name),
            lambda: filesystem.publish(name, b"x"),
            lambda: filesystem.read(name, 0, 1),
            lambda: filesystem.read_into(name, 0, memoryview(bytearray(1))),
            lambda: filesystem.read_all(name, limit_nbytes=1),
            lambda: filesystem.file_nbytes(name),
            lambda: filesystem.remove([name]),
        ):
            with pytest.raises(UnsafePathError) as caught:
                use()
            assert caught.value.path == filesystem.path

    def test_many_threads(self, filesystem: Filesystem) -> None:
        data = bytes(range(256)) * 4096

        def write_one(number: int) -> None:
            write_file(filesystem, f"file-{number}", data[number:])

        def read_one(number: int) -> bool:
            buffer = bytearray(1000)
            filesystem.read_into(f"file-{number % 4}", number * 1000, memoryview(buffer))
            return buffer == data[number % 4 :][number * 1000 :][:1000]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write_one, range(4)))
            assert all(pool.map(read_one, range(100)))

    def test_usable_again_after_close(self, filesystem: Filesystem) -> None:
        write_file(filesystem, "a", b"x")
        assert filesystem.read("a", 0, 1) == b"x"
        filesystem.close()
        assert filesystem.read("a", 0, 1) == b"x"

    def test_create_directory_twice(self, filesystem: Filesystem) -> None:
        filesystem.create_directory()
        filesystem.publish("a", b"x")
        filesystem.create_directory()
        assert filesystem.list_names() == ["a"]
