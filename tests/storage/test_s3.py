"""S3 through s3fs: the suite, and what object stores get wrong; on moto, and on a real server where there is one."""

from __future__ import annotations

import errno
import gc
import os
import re
import socket
import time
import tracemalloc
from typing import Any

import pytest
import s3fs

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.open import open_filesystem

from .suite import FilesystemSuite, Place, write_file

pytestmark = pytest.mark.s3

PART_NBYTES = 16 << 20


@pytest.mark.ci
class TestMoto(FilesystemSuite):
    @pytest.fixture
    def place(self, s3_store: Place) -> Place:
        return s3_store


class TestRealS3(FilesystemSuite):
    @pytest.fixture
    def place(self, real_s3_store: Place) -> Place:
        return real_s3_store


def client_of(store: Place) -> tuple[s3fs.S3FileSystem, str]:
    """A client beside ours, and the bucket."""
    url, options = store
    return s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False), url.split("/")[2]


def unfinished_uploads(store: Place) -> list[Any]:
    client, bucket = client_of(store)
    return list(client.list_multipart_uploads(bucket))


@pytest.mark.ci
def test_large_files_are_multipart_uploads(any_s3_store: Place) -> None:
    url, options = any_s3_store
    filesystem = open_filesystem(url, storage_options=options)
    data = bytes(range(256)) * (100_000_000 // 256)
    stream = filesystem.open_output("large")
    stream.write(memoryview(data)[:60_000_000])  # one write of several parts, then one that continues a part
    stream.write(memoryview(data)[60_000_000:])
    assert len(unfinished_uploads(any_s3_store)) == 1
    stream.close()
    client, _ = client_of(any_s3_store)
    parts = -(-len(data) // PART_NBYTES)
    assert client.info(f"{url}/large")["ETag"].strip('"').endswith(f"-{parts}")
    assert filesystem.file_nbytes("large") == len(data)
    assert filesystem.read("large", PART_NBYTES - 5, PART_NBYTES + 5) == data[PART_NBYTES - 5 : PART_NBYTES + 5]
    buffer = bytearray(len(data))
    filesystem.read_into("large", 0, memoryview(buffer))
    assert buffer == data
    assert unfinished_uploads(any_s3_store) == []


def test_the_user_chooses_the_part_size(s3_store: Place) -> None:
    url, options = s3_store
    filesystem = open_filesystem(url, storage_options={**options, "default_block_size": 5 << 20})
    write_file(filesystem, "large", bytes(21 << 20))
    assert client_of(s3_store)[0].info(f"{url}/large")["ETag"].strip('"').endswith("-5")


def test_parts_grow_so_that_ten_thousand_suffice(s3_store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_nvcomp.storage.s3.object._PARTS_BEFORE_GROWTH", 2)
    url, options = s3_store
    filesystem = open_filesystem(url, storage_options={**options, "default_block_size": 5 << 20})
    data = bytes(range(256)) * (36 << 12)  # 36 MiB: parts of 5, 5, 10, 10 and the rest
    write_file(filesystem, "large", data)
    assert client_of(s3_store)[0].info(f"{url}/large")["ETag"].strip('"').endswith("-5")
    assert filesystem.read("large", 0, len(data)) == data


def test_an_upload_takes_few_parts_of_memory(real_s3_store: Place) -> None:
    url, options = real_s3_store
    filesystem = open_filesystem(url, storage_options=options)
    data = bytes(128 << 20)
    tracemalloc.start()
    try:
        write_file(filesystem, "large", data)
        assert tracemalloc.get_traced_memory()[1] < 4 * PART_NBYTES
    finally:
        tracemalloc.stop()


@pytest.mark.ci
def test_abort_ends_the_upload(any_s3_store: Place) -> None:
    url, options = any_s3_store
    filesystem = open_filesystem(url, storage_options=options)
    stream = filesystem.open_output("large")
    stream.write(bytes(40 << 20))
    assert len(unfinished_uploads(any_s3_store)) == 1
    stream.abort()
    assert unfinished_uploads(any_s3_store) == []
    del stream
    gc.collect()
    assert filesystem.list_names() == []


@pytest.mark.ci
def test_a_close_that_fails_commits_nothing(any_s3_store: Place) -> None:
    url, options = any_s3_store
    filesystem = open_filesystem(url, storage_options=options, deadline_seconds=4)  # moto says 500
    stream = filesystem.open_output("large")
    stream.write(bytes(20 << 20))
    client, bucket = client_of(any_s3_store)
    client.clear_multipart_uploads(bucket)  # as a lifecycle rule may do
    with pytest.raises(StorageError) as caught:
        stream.close()
    assert caught.value.path == f"{url}/large"
    stream.abort()
    assert filesystem.list_names() == []
    assert unfinished_uploads(any_s3_store) == []


def test_a_write_that_fails_is_not_committed_by_close(any_s3_store: Place) -> None:
    url, options = any_s3_store
    filesystem = open_filesystem(url, storage_options=options, deadline_seconds=4)  # moto says 500
    stream = filesystem.open_output("large")
    stream.write(bytes(20 << 20))
    client, bucket = client_of(any_s3_store)
    client.clear_multipart_uploads(bucket)
    with pytest.raises(StorageError):
        stream.write(bytes(20 << 20))
    with pytest.raises(AssertionError):
        stream.close()
    stream.abort()
    assert filesystem.list_names() == []


@pytest.mark.ci
@pytest.mark.parametrize("nbytes", [10, 20 << 20])
def test_a_dropped_stream_commits_nothing(any_s3_store: Place, nbytes: int) -> None:
    url, options = any_s3_store
    filesystem = open_filesystem(url, storage_options=options)
    stream = filesystem.open_output("dropped")
    stream.write(bytes(nbytes))
    del stream
    gc.collect()
    assert filesystem.list_names() == []


def test_a_listing_cache_that_the_user_wants_is_not_believed(any_s3_store: Place) -> None:
    url, options = any_s3_store
    filesystem = open_filesystem(url, storage_options={**options, "use_listings_cache": True})
    filesystem.publish("a", b"x")
    assert filesystem.list_names() == ["a"]
    client, _ = client_of(any_s3_store)
    client.pipe_file(f"{url}/b", b"x")
    assert filesystem.list_names() == ["a", "b"]
    client.pipe_file(f"{url}/a", b"longer")
    assert filesystem.file_nbytes("a") == 6
    client.rm_file(f"{url}/a")
    assert filesystem.file_nbytes("a") is None


def test_a_bucket_itself_and_odd_prefixes(any_s3_store: Place) -> None:
    bucket_url, options = any_s3_store[0].rsplit("/", 1)[0], any_s3_store[1]
    for path in (bucket_url, f"{bucket_url}/", f"{bucket_url}/run[1]*?", f"{bucket_url}/with space/ümläut"):
        filesystem = open_filesystem(path, storage_options=options)
        filesystem.create_directory()
        filesystem.publish("a", b"x")
        write_file(filesystem, "b", b"xy")
        assert filesystem.list_names() == ["a", "b"]
        assert filesystem.read("b", 1, 2) == b"y"
        filesystem.remove(["b"])
        assert filesystem.list_names() == ["a"]


def test_folder_markers_are_not_files(any_s3_store: Place) -> None:
    url, options = any_s3_store
    client, _ = client_of(any_s3_store)
    client.touch(f"{url}/step-1/")  # what web consoles make for a "folder"
    filesystem = open_filesystem(f"{url}/step-1", storage_options=options)
    assert filesystem.list_names() == []
    filesystem.publish("a", b"x")
    assert filesystem.list_names() == ["a"]


def test_missing_bucket(any_s3_store: Place) -> None:
    filesystem = open_filesystem("s3://there-is-no-such-bucket/run", storage_options=any_s3_store[1])
    filesystem.create_directory()  # a mistyped bucket is not made
    assert filesystem.list_names() == []
    with pytest.raises(StorageError) as caught:
        filesystem.publish("a", b"x")
    assert caught.value.errno == errno.ENOENT
    stream = filesystem.open_output("a")
    stream.write(b"x")
    with pytest.raises(StorageError, match=r"bucket does not exist|NoSuchBucket"):
        stream.close()
    stream.abort()


def test_wrong_secret(real_s3_store: Place) -> None:
    url, options = real_s3_store
    filesystem = open_filesystem(url, storage_options={**options, "secret": "wrong"})
    with pytest.raises(StorageError, match="Check the permissions") as caught:
        filesystem.publish("a", b"x")
    assert caught.value.errno == errno.EACCES


@pytest.mark.ci
@pytest.mark.parametrize("listening", [False, True])
def test_no_server(s3_store: Place, listening: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen(50)  # connections succeed, and no answer ever comes
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = {**s3_store[1], "endpoint_url": endpoint}
        filesystem = open_filesystem("s3://bucket/run", storage_options=options, deadline_seconds=1.5)
        began = time.monotonic()
        with pytest.raises(StorageError, match=endpoint) as caught:
            filesystem.publish("a", b"x")
        assert time.monotonic() - began < 30
        assert caught.value.errno == errno.ETIMEDOUT and caught.value.attempts and caught.value.attempts > 2
        assert re.search(r"after \d+ attempts in [12] s", str(caught.value))


def test_unfinished_uploads(any_s3_store: Place) -> None:
    """As a killed client leaves them: only those directly in the directory are listed, and aborted."""
    url, options = any_s3_store
    client, bucket = client_of(any_s3_store)
    filesystem = open_filesystem(f"{url}/step", storage_options=options)
    before = filesystem.now_seconds()
    keys = ["run/step/a", "run/step/a", "run/step/b", "run/step/inner/c", "run/step-2/a", "run/a"]
    for key in keys:
        client.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    found = filesystem.list_uploads()
    assert sorted(upload.name for upload in found) == ["a", "a", "b"]
    if "DCP_NVCOMP_TEST_S3" in os.environ and options["endpoint_url"] == os.environ["DCP_NVCOMP_TEST_S3"]:
        # moto says 2010 of every upload
        assert all(before - 60 <= upload.begun_seconds <= before + 60 for upload in found)
    filesystem.abort_uploads(found)
    filesystem.abort_uploads(found)  # gone already
    assert sorted(upload["Key"] for upload in unfinished_uploads(any_s3_store)) == sorted(keys[3:])


def test_acl_of_all_objects(s3_store: Place) -> None:
    """s3fs itself sends `acl` only with the files that it opens."""
    url, options = s3_store
    client, bucket = client_of(s3_store)
    filesystem = open_filesystem(url, storage_options={**options, "s3_additional_kwargs": {"acl": "public-read"}})
    filesystem.publish("small", b"x")
    write_file(filesystem, "large", bytes(PART_NBYTES + 1))
    for name in ("small", "large"):
        grants = client.call_s3("get_object_acl", Bucket=bucket, Key=f"run/{name}")["Grants"]
        assert any(grant["Grantee"].get("URI", "").endswith("/AllUsers") for grant in grants), name


def test_checksums_of_parts(any_s3_store: Place) -> None:
    url, options = any_s3_store
    algorithm = {"s3_additional_kwargs": {"ChecksumAlgorithm": "SHA256"}}
    filesystem = open_filesystem(url, storage_options={**options, **algorithm})
    data = bytes(range(256)) * (2 * PART_NBYTES // 256) + b"rest"
    write_file(filesystem, "large", data)
    assert filesystem.read("large", PART_NBYTES - 2, len(data)) == data[PART_NBYTES - 2 :]


def test_deadline_among_the_storage_options() -> None:
    """As the commands pass it on."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s", "storage_deadline_seconds": 1}
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"after \d+ attempts in \d+ s"):
        open_filesystem("s3://bucket/run", storage_options=options).file_nbytes("x")
    assert time.monotonic() - began < 60
