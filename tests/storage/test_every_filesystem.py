"""What every Filesystem does, on each kind of storage; those with servers in CI only."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_nvcomp.errors import ConcurrentSaveError, FormatError, StorageError, TruncatedFileError, UnsafePathError
from dcp_nvcomp.storage.base import Filesystem
from tests.servers.base import Location
from tests.stores.kinds import NETWORKED, parameters

from .files import in_parts, made, opened, part_nbytes, write_file

pytestmark = pytest.mark.filterwarnings("ignore:.*can't replace a file in one step")

_HERE = parameters("disk", "memory", "plain-moving", "plain-posix", "plain-refusing", "plain")
_THERE = [
    pytest.param(*one.values, marks=[*one.marks, pytest.mark.ci], id=one.id)
    for one in (*parameters("mounted"), *NETWORKED)
]
_UNSAFE_NAMES = (
    *("", "/x", "..", "../x", "a/../x", "a/..", "./x", "a//x", "a/", "a\\x"),
    *("x\0", "x\n", "file:x", "s3://b/x", "memory::x", "a::b"),
)


@pytest.fixture(params=[*_HERE, *_THERE])
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_ranges_of_a_written_file(filesystem: Filesystem) -> None:
    data = bytes(range(256)) * 40
    stream = filesystem.open_output("__0_0_a.distcp")
    stream.write(memoryview(data)[:100])
    stream.write(b"")
    stream.write(data[100:5000])
    stream.write(memoryview(bytearray(data[5000:])).cast("I"))  # any buffer, by its bytes
    stream.close()
    stream.abort()  # does nothing now
    assert filesystem.file_nbytes("__0_0_a.distcp") == len(data)
    for start, stop in [(0, len(data)), (0, 1), (99, 101), (4999, 9000), (len(data) - 1, len(data)), (7, 7)]:
        assert filesystem.read("__0_0_a.distcp", start, stop) == data[start:stop]
        buffer = bytearray(stop - start)
        filesystem.read_into("__0_0_a.distcp", start, memoryview(buffer))
        assert buffer == data[start:stop]
    assert filesystem.read_all("__0_0_a.distcp", limit_nbytes=len(data)) == data
    filesystem.close()  # it may be used again
    assert filesystem.read("__0_0_a.distcp", 0, 1) == data[:1]


def test_a_written_buffer_may_be_reused(filesystem: Filesystem) -> None:
    buffer = bytearray(1000)
    stream = filesystem.open_output("reused")
    for value in range(10):
        buffer[:] = bytes([value]) * len(buffer)
        stream.write(memoryview(buffer))
    buffer[:] = b"x" * len(buffer)
    stream.close()
    assert filesystem.read("reused", 0, 10_000) == b"".join(bytes([value]) * 1000 for value in range(10))


def test_a_range_beyond_the_end(filesystem: Filesystem) -> None:
    """It is certain at once: nothing is repeated."""
    write_file(filesystem, "short", b"0123456789")
    write_file(filesystem, "empty", b"")
    assert filesystem.file_nbytes("empty") == 0
    assert filesystem.read_all("empty", limit_nbytes=0) == filesystem.read("empty", 0, 0) == b""
    began = time.monotonic()
    for name, start, stop in (
        *(("short", *range_) for range_ in ((0, 11), (9, 11), (10, 11), (1000, 2000), (0, 1 << 50))),
        *(("empty", start, start + 1) for start in (0, 10)),
    ):
        with pytest.raises(TruncatedFileError) as caught:
            filesystem.read(name, start, stop)
        assert caught.value.byte_range == (start, stop)
        assert caught.value.path == filesystem.location(name)
        if stop < 1 << 20:
            with pytest.raises(TruncatedFileError):
                filesystem.read_into(name, start, memoryview(bytearray(stop - start)))
    assert time.monotonic() - began < 40


def test_sizes_and_ages_are_those_of_the_storage(filesystem: Filesystem) -> None:
    before = filesystem.now_seconds()
    write_file(filesystem, "a", b"123")
    write_file(filesystem, "b", b"")
    after = filesystem.now_seconds()
    files = filesystem.list_files()
    assert [(file.name, file.nbytes) for file in files] == [("a", 3), ("b", 0)]
    for file in files:  # some stores have whole seconds only
        assert file.modified_seconds is not None
        assert before - 1.1 <= file.modified_seconds <= after + 1.1
    assert filesystem.list_uploads() == []
    filesystem.abort_uploads([])


def test_missing_file(filesystem: Filesystem, place: Location) -> None:
    for lonely in (filesystem, opened(place, below="step-that-never-was")):
        assert lonely.file_nbytes("missing") is None
        assert lonely.list_names() == [] and lonely.list_below().files == []
        lonely.remove(["missing"])
        for read in (
            lambda: lonely.read("missing", 0, 1),
            lambda: lonely.read_into("missing", 0, memoryview(bytearray(1))),
            lambda: lonely.read_all("missing", limit_nbytes=1),
        ):
            with pytest.raises(StorageError) as caught:
                read()
            assert caught.value.errno == errno.ENOENT
            assert caught.value.path == lonely.location("missing")


def test_files_of_a_checkpoint_beside(place: Location) -> None:
    """What a checkpoint shares with another, in the same parent directory, is read and marked through it."""
    own, other = made(place, below="run/step-2"), made(place, below="run/step-1")
    write_file(other, "__0_0_a.distcp", bytes(range(100)))
    name = "../step-1/__0_0_a.distcp"
    assert own.file_nbytes(name) == 100
    assert own.read(name, 7, 9) == b"\7\x08"
    buffer = bytearray(3)
    own.read_into(name, 97, memoryview(buffer))
    assert buffer == b"abc"
    assert own.read_all(name, limit_nbytes=100) == bytes(range(100))
    assert own.location(name) == other.location("__0_0_a.distcp")
    own.publish("../step-1/.shared.step-2", b"")
    assert other.list_names() == [".shared.step-2", "__0_0_a.distcp"] and own.list_names() == []
    own.publish("../step-1/.shared.step-2", b"")
    own.remove(["../step-1/.shared.step-2", "../step-3/.shared.step-2"])
    assert other.list_names() == ["__0_0_a.distcp"]
    assert own.file_nbytes("../step-3/x") is None
    for unsafe in ("../x", "../../run/x", "../step-1/../step-1/x", "../step-1/./x", "../step-1/", "..//x", "a/../../x"):
        with pytest.raises(UnsafePathError):
            own.read(unsafe, 0, 1)
        with pytest.raises(UnsafePathError):
            own.remove([unsafe])


def test_read_all_has_a_limit(filesystem: Filesystem) -> None:
    filesystem.publish("some", b"0123456789")
    assert filesystem.read_all("some", limit_nbytes=10) == b"0123456789"
    with pytest.raises(FormatError, match="larger than 9"):
        filesystem.read_all("some", limit_nbytes=9)


def test_names_of_this_directory_only(place: Location) -> None:
    filesystem = made(place, below="step-1")
    for folder in ("step-10", "step-1/inner", "step"):
        made(place, below=folder).publish("not-here", b"x")
    assert filesystem.list_names() == []
    filesystem.publish(".metadata", b"x")
    write_file(filesystem, "b", b"")
    write_file(filesystem, "a", b"x")
    filesystem.create_directory()  # it is there
    assert filesystem.list_names() == [".metadata", "a", "b"]
    assert filesystem.file_nbytes("inner") is None
    below = filesystem.list_below()
    assert sorted(file.name for file in below.files) == [".metadata", "a", "b", "inner/not-here"] and not below.failed
    filesystem.remove(["a", "missing", ".metadata"])
    filesystem.remove([])
    assert filesystem.list_names() == ["b"]


def test_what_others_do_is_seen_at_once(filesystem: Filesystem, place: Location) -> None:
    other = opened(place)
    assert (filesystem.list_names(), filesystem.file_nbytes("a")) == ([], None)
    other.publish("a", b"1")
    assert (filesystem.list_names(), filesystem.file_nbytes("a")) == (["a"], 1)
    other.publish("a", b"12")
    assert filesystem.file_nbytes("a") == 2
    assert filesystem.read_all("a", limit_nbytes=2) == b"12"
    other.remove(["a"])
    assert (filesystem.list_names(), filesystem.file_nbytes("a")) == ([], None)


def test_publish_replaces(filesystem: Filesystem) -> None:
    for data in (b"first", b"the second one", b"3"):
        filesystem.publish(".metadata", data)
        assert filesystem.read_all(".metadata", limit_nbytes=100) == data
        assert filesystem.list_names() == [".metadata"]


def test_publish_without_overwrite(filesystem: Filesystem) -> None:
    filesystem.publish(".metadata", b"the first one", overwrite=False)
    with pytest.raises(ConcurrentSaveError) as caught:
        filesystem.publish(".metadata", b"second", overwrite=False)
    assert caught.value.path == filesystem.location(".metadata")
    assert filesystem.read_all(".metadata", limit_nbytes=100) == b"the first one"
    assert filesystem.list_names() == [".metadata"]


def test_publish_is_atomic_for_readers(filesystem: Filesystem, kind_name: str) -> None:
    if kind_name in ("plain", "plain-refusing"):
        return  # as the warning says
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


def test_abort_leaves_nothing(filesystem: Filesystem) -> None:
    for nbytes in (0, 10, 40 << 20):
        stream = filesystem.open_output("aborted")
        stream.write(bytes(nbytes))
        stream.abort()
        stream.abort()
        assert filesystem.list_names() == [] and filesystem.list_uploads() == []
        assert filesystem.file_nbytes("aborted") is None


def test_a_replacement_takes_the_place_when_it_is_closed(filesystem: Filesystem) -> None:
    for nbytes in (0, 100, 11 << 20):
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


def test_no_name_leads_outside(filesystem: Filesystem) -> None:
    for name in _UNSAFE_NAMES:
        uses: list[Any] = [
            lambda name: filesystem.open_output(name),
            lambda name: filesystem.publish(name, b"x"),
            lambda name: filesystem.read(name, 0, 1),
            lambda name: filesystem.read_into(name, 0, memoryview(bytearray(1))),
            lambda name: filesystem.read_all(name, limit_nbytes=1),
            lambda name: filesystem.file_nbytes(name),
            lambda name: filesystem.remove([name]),
        ]
        for use in uses:
            with pytest.raises(UnsafePathError) as caught:
                use(name)
            assert caught.value.path == filesystem.path


def test_odd_names(place: Location) -> None:
    names = ["a b", "ü", "x%20y", "1+1", "grüße-ß", "100%25", "日本"]
    if not place[0].startswith("az://"):
        names += ["h#1", "a&b=c", "o", "semi;colon", "[x]", "'\""[: 1 if place[0].startswith("smb:") else 2]]
    for name in names:
        filesystem = made(place, below=name)
        filesystem.publish(name, b"x")
        write_file(filesystem, "large", bytes(1000))
        assert filesystem.list_names() == sorted([name, "large"])
        assert filesystem.read(name, 0, 1) == b"x" and filesystem.file_nbytes("large") == 1000
        filesystem.remove(["large"])
    assert {file.name for file in opened(place).list_below().files} == {f"{name}/{name}" for name in names}


def test_files_about_the_length_of_parts(place: Location) -> None:
    part = part_nbytes(place) or 1 << 16
    filesystem = made(place, **in_parts(place))
    for number, nbytes in enumerate((1, part - 1, part, part + 1, 4 * part + 7)):
        data = os.urandom(nbytes)
        stream = filesystem.open_output(f"f{number}")
        stream.write(memoryview(data)[: 2 * part + 1])  # one write of several parts, then one that continues a part
        stream.write(memoryview(data)[2 * part + 1 :])
        stream.close()
        assert filesystem.read_all(f"f{number}", limit_nbytes=nbytes) == data
        buffer = bytearray(nbytes)
        filesystem.read_into(f"f{number}", 0, memoryview(buffer))
        assert buffer == data


def test_many_threads(place: Location) -> None:
    filesystem = made(place, **in_parts(place))
    versions = [os.urandom((1 << 19) + number) for number in range(16)]

    def read_one(number: int) -> bool:
        buffer = bytearray(1000)
        filesystem.read_into(f"f{number % 16}", number * 1000, memoryview(buffer))
        return buffer == versions[number % 16][number * 1000 :][:1000]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: write_file(filesystem, f"f{number}", versions[number]), range(16)))
        assert all(pool.map(read_one, range(100)))
        found = list(pool.map(lambda number: filesystem.read_all(f"f{number}", limit_nbytes=1 << 30), range(16)))
    assert found == versions


def test_dropped_streams_hold_nothing(place: Location) -> None:
    """Whoever forgets a stream has no file, but where it is written in place; and those that come later go on."""
    filesystem, parts = made(place, **in_parts(place)), (part_nbytes(place) or 1000)
    for number in range(4):
        stream = filesystem.open_output(f"dropped-{number}")
        stream.write(bytes((0, parts // 2, 2 * parts, 3 * parts)[number]))
        del stream
        gc.collect()
    time.sleep(0.2)
    if place[0].startswith(("s3:", "az:", "gs:")):
        assert filesystem.list_names() == []
    write_file(filesystem, "kept", b"x")
    assert filesystem.read("kept", 0, 1) == b"x"
