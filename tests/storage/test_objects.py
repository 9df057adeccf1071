"""What object stores have in common, on moto, a real S3 server, Azurite and gcp-storage-emulator."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import s3fs

from dcp_nvcomp.errors import ConcurrentSaveError, ConfigurationError, StorageError, TruncatedFileError
from dcp_nvcomp.storage.objects.azure import AzureContainer
from dcp_nvcomp.storage.objects.bucket import Bucket
from dcp_nvcomp.storage.objects.gcs import GcsBucket
from dcp_nvcomp.storage.open import open_filesystem
from tests.servers.gcs import GcsServer

from .suite import FilesystemSuite, Place, write_file


@dataclass(frozen=True)
class Store:
    """A fresh place, how the store's own clients see it, and the class of ours."""

    url: str
    options: dict[str, Any]
    names: Callable[[], list[str]]
    put: Callable[[str, bytes], Any]
    bucket: Any  # our class; none of S3's
    missing: str
    part_nbytes: int

    def in_parts(self) -> dict[str, Any]:
        """Return options for uploads in the smallest parts."""
        return {**self.options, "default_block_size": self.part_nbytes}


def _s3(fixture: str) -> Callable[[pytest.FixtureRequest], Iterator[Store]]:
    def opened(request: pytest.FixtureRequest) -> Iterator[Store]:
        url, options = request.getfixturevalue(fixture)
        client = s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
        bucket = url.split("/")[2]
        yield Store(
            url,
            options,
            lambda: [name.partition("/")[2] for name in client.find(bucket)],
            lambda name, data: client.call_s3("put_object", Bucket=bucket, Key=f"run/{name}", Body=data),
            None,
            "s3://there-is-no-such-bucket/run",
            5 << 20,
        )

    return opened


def _azure(request: pytest.FixtureRequest) -> Iterator[Store]:
    from azure.storage.blob import ContainerClient

    url, options = request.getfixturevalue("azure_store")
    with ContainerClient.from_connection_string(options["connection_string"], url.split("/")[2]) as client:
        yield Store(
            url,
            options,
            lambda: [blob.name for blob in client.list_blobs()],
            lambda name, data: client.upload_blob(f"run/{name}", data, overwrite=True),
            AzureContainer,
            "az://no-such-container/run",
            5 << 20,
        )


def _gcs(request: pytest.FixtureRequest) -> Iterator[Store]:
    url, options = request.getfixturevalue("gcs_store")
    server: GcsServer = request.getfixturevalue("gcs_server")
    yield Store(
        url,
        options,
        lambda: [found["name"] for found in server.objects(url)],
        lambda name, data: server.put(f"{url}/{name}", data),
        GcsBucket,
        "gs://no-such-bucket/run",
        256 << 10,
    )


AZURE = pytest.param(_azure, marks=pytest.mark.azure, id="azure")
GCS = pytest.param(_gcs, marks=pytest.mark.gcs, id="gcs")
S3 = [
    pytest.param(_s3("s3_store"), marks=pytest.mark.s3, id="moto"),
    pytest.param(_s3("real_s3_store"), marks=pytest.mark.s3, id="real"),
]
EVERY = pytest.mark.parametrize("store", [*S3, AZURE, GCS], indirect=True)


@pytest.fixture(params=[AZURE, GCS])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "CONNECTION_STRING", "ENDPOINT"):
        request.getfixturevalue("monkeypatch").delenv(f"AZURE_STORAGE_{name}", raising=False)
    yield from request.param(request)


@pytest.mark.ci
@EVERY
class TestSuite(FilesystemSuite):
    @pytest.fixture
    def place(self, store: Store) -> Place:
        return store.url, store.options


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
@EVERY
def test_large_files_are_there_when_they_are_closed(store: Store) -> None:
    filesystem = open_filesystem(store.url, storage_options=store.options)
    data = bytes(range(256)) * (100_000_000 // 256)
    stream = filesystem.open_output("large")
    stream.write(memoryview(data)[:60_000_000])  # one write of several parts, then one that continues a part
    assert store.names() == []
    stream.write(memoryview(data)[60_000_000:])
    stream.close()
    assert store.names() == ["run/large"] and filesystem.file_nbytes("large") == len(data)
    buffer = bytearray(len(data))
    filesystem.read_into("large", 0, memoryview(buffer))
    assert buffer == data


@pytest.mark.ci
@EVERY
@pytest.mark.parametrize("parts", [0, 0.5, 3])
def test_a_dropped_stream_commits_nothing(store: Store, parts: float) -> None:
    stream = open_filesystem(store.url, storage_options=store.in_parts()).open_output("dropped")
    stream.write(bytes(int(parts * store.part_nbytes)))
    del stream
    gc.collect()
    time.sleep(0.2)
    assert store.names() == []


@EVERY
def test_odd_names(store: Store) -> None:
    folders = ["a b", "ü", "x%20y", "1+1", "q?"]
    if store.bucket is not AzureContainer:
        folders += ["h#1", "a&b=c", "o", "semi;colon", "[x]*", "'\"", "with space/ümläut"]
    for folder in folders:
        filesystem = open_filesystem(f"{store.url}/{folder}", storage_options=store.in_parts())
        filesystem.publish(".metadata", folder.encode())
        write_file(filesystem, "large", bytes(store.part_nbytes + 1))
        assert filesystem.list_names() == [".metadata", "large"]
        assert filesystem.read_all(".metadata", limit_nbytes=99) == folder.encode()
        assert filesystem.file_nbytes("large") == store.part_nbytes + 1
        filesystem.remove(["large"])
    assert sorted(store.names()) == sorted(f"run/{one}/.metadata" for one in folders)


@EVERY
def test_a_bucket_itself(store: Store) -> None:
    filesystem = open_filesystem(store.url.rpartition("/")[0], storage_options=store.options)
    write_file(filesystem, "a", b"1")
    open_filesystem(store.url, storage_options=store.options).publish("b", b"2")
    assert filesystem.list_names() == ["a"]
    assert sorted(file.name for file in filesystem.list_below().files) == ["a", "run/b"]
    assert sorted(store.names()) == ["a", "run/b"]


@pytest.mark.parametrize("store", [*S3, GCS], indirect=True)
def test_folders_of_the_console_are_no_files(store: Store) -> None:
    filesystem = open_filesystem(store.url, storage_options=store.options)
    filesystem.publish("a", b"x")
    store.put("", b"")
    store.put("inner/", b"")
    assert filesystem.list_names() == ["a"]
    assert [file.name for file in filesystem.list_below().files] == ["a"]


def test_a_missing_bucket(store: Store) -> None:
    filesystem = open_filesystem(store.missing, storage_options=store.options, deadline_seconds=5)
    assert filesystem.file_nbytes("a") is None and filesystem.list_names() == []
    assert filesystem.list_below().files == [] and filesystem.list_folders() == []
    for use in (lambda: filesystem.publish("a", b"x"), lambda: write_file(filesystem, "a", b"x")):
        with pytest.raises(StorageError, match=r"(bucket|container) does not exist") as caught:
            use()
        assert f"{store.missing}/a" in str(caught.value) and caught.value.errno == errno.ENOENT


def test_a_range_beyond_the_end_is_not_repeated(store: Store) -> None:
    filesystem = open_filesystem(store.url, storage_options=store.options)
    write_file(filesystem, "short", b"0123456789")
    write_file(filesystem, "empty", b"")
    for name, start in (("short", 10), ("short", 1000), ("empty", 0), ("empty", 10)):
        began = time.monotonic()
        with pytest.raises(TruncatedFileError):
            filesystem.read(name, start, start + 1)
        assert filesystem.read_all("empty", limit_nbytes=9) == b""
        assert time.monotonic() - began < 10


# --- publishing ------------------------------------------------------------------------------------------------------


def test_writers_of_the_same_moment(store: Store) -> None:
    """One of those that may not replace wins; of those that may, the last one's bytes are there, whole."""
    filesystems = [open_filesystem(store.url, storage_options=store.options) for _ in range(8)]
    barrier = threading.Barrier(len(filesystems))

    def publish_one(number: int, name: str, overwrite: bool) -> bool:
        barrier.wait()
        try:
            filesystems[number].publish(name, bytes([number]) * 1000, overwrite=overwrite)
        except ConcurrentSaveError:
            return False
        return True

    with ThreadPoolExecutor(len(filesystems)) as pool:
        for turn in range(10):
            won = list(pool.map(publish_one, range(8), [f"{turn}"] * 8, [False] * 8))
            found = filesystems[0].read_all(f"{turn}", limit_nbytes=1000)
            assert won.count(True) == 1 and found == bytes([won.index(True)]) * 1000
            assert all(pool.map(publish_one, range(8), [f"{turn}"] * 8, [True] * 8))
            found = filesystems[0].read_all(f"{turn}", limit_nbytes=1000)
            assert len(found) == 1000 and len(set(found)) == 1


def lose_an_answer(kind: type[Bucket], monkeypatch: pytest.MonkeyPatch, *, done: bool, other: Any = None) -> list[str]:
    """Let the first conditional write fail, done or not, and another save come in between; return what was written."""
    sent, put = list[str](), kind.put_over

    async def failing(bucket: Bucket, key: str, data: bytes, version: str | None) -> None:
        sent.append(key)
        if len(sent) > 1 or done:
            await put(bucket, key, data, version)
        if len(sent) > 1:
            return
        if other is not None:
            other()
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(kind, "put_over", failing)
    return sent


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_a_write_without_an_answer_is_repeated_unless_it_was_done(
    store: Store, monkeypatch: pytest.MonkeyPatch, done: bool, overwrite: bool
) -> None:
    filesystem = open_filesystem(store.url, storage_options=store.options)
    if overwrite:
        filesystem.publish("a", b"old")
    sent = lose_an_answer(store.bucket, monkeypatch, done=done)
    filesystem.publish("a", b"new", overwrite=overwrite)
    assert len(sent) == (1 if done else 2) and filesystem.read_all("a", limit_nbytes=9) == b"new"


@pytest.mark.parametrize("done", [True, False])
def test_what_another_save_published_meanwhile_stays(store: Store, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    """Whether ours was there before it is not known, so neither is whether our files may still be named."""
    filesystem = open_filesystem(store.url, storage_options=store.options)
    filesystem.publish("a", b"old")
    sent = lose_an_answer(store.bucket, monkeypatch, done=done, other=lambda: store.put("a", b"theirs"))
    with pytest.raises(ConcurrentSaveError) as caught:
        filesystem.publish("a", b"ours")
    assert caught.value.outcome_unknown and len(sent) == 1
    assert filesystem.read_all("a", limit_nbytes=9) == b"theirs"


def test_what_another_save_publishes_after_the_look_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The condition refuses what is sent again."""
    filesystem = open_filesystem(store.url, storage_options=store.options)
    filesystem.publish("a", b"old")
    sent = lose_an_answer(store.bucket, monkeypatch, done=False)
    head, looked = store.bucket.head, list[str]()

    async def head_and_then(bucket: Bucket, key: str) -> Any:
        found = await head(bucket, key)
        looked.append(key)
        if len(looked) == 2:  # the first look was before the first write
            store.put("a", b"theirs")
        return found

    monkeypatch.setattr(store.bucket, "head", head_and_then)
    with pytest.raises(ConcurrentSaveError) as caught:
        filesystem.publish("a", b"ours")
    assert caught.value.outcome_unknown and len(sent) == 2
    assert filesystem.read_all("a", limit_nbytes=9) == b"theirs"


# --- trouble ---------------------------------------------------------------------------------------------------------


_KINDS = [
    pytest.param("s3", marks=pytest.mark.s3),
    pytest.param("az", marks=pytest.mark.azure),
    pytest.param("gs", marks=pytest.mark.gcs),
]


@pytest.mark.ci
@pytest.mark.parametrize("listening", [True, False])
@pytest.mark.parametrize("kind", _KINDS)
def test_no_server(kind: str, listening: bool) -> None:
    """The port is closed, or nothing ever answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen(100)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = {"key": "ci", "secret": "cisecret", "endpoint_url": address}
        if kind == "gs":
            options = {"token": "anon", "endpoint_url": address}
        if kind == "az":
            options = {"account_name": "ckpt", "account_key": "QUJD", "endpoint": f"{address}/ckpt"}
        filesystem = open_filesystem(f"{kind}://c/run", storage_options=options, deadline_seconds=3)
        uses: list[Callable[[], Any]] = [
            lambda: filesystem.file_nbytes("a"),
            lambda: filesystem.list_files(),
            lambda: filesystem.read("a", 0, 1),
            lambda: filesystem.publish("a", b"x"),
            lambda: write_file(filesystem, "a", b"x"),
            lambda: write_file(filesystem, "a", bytes(40 << 20)),
            lambda: filesystem.remove(["a"]),
        ]

        def failing(use: Callable[[], Any]) -> StorageError:
            start = time.monotonic()
            with pytest.raises(StorageError) as caught:
                use()
            assert time.monotonic() - start < 8
            return caught.value

        with ThreadPoolExecutor(len(uses)) as pool:
            for error in pool.map(failing, uses):
                assert error.errno == errno.ETIMEDOUT and f"{kind}://c/run" in str(error)


def test_a_forked_child_is_refused_what_its_parent_opened(store: Store) -> None:
    """It would wait for threads that it does not have."""
    filesystem = open_filesystem(store.url, storage_options=store.options)
    filesystem.publish("a", b"x")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        words = "nothing was raised"
        try:
            filesystem.read("a", 0, 1)
        except ConfigurationError as error:
            words = str(error)
        finally:
            os.write(writing, words.encode())
            os._exit(0)
    os.close(writing)
    try:
        with open(reading, "rb") as answer:
            assert b"was opened by the process that this one was forked from" in answer.read()
    finally:
        os.waitpid(child, 0)
    assert filesystem.read("a", 0, 1) == b"x"
