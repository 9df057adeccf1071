"""S3 through s3fs: what test_objects.py does not have of it; on moto, and on a real server where there is one."""

from __future__ import annotations

import errno
import gc
import os
import socket
import time
import tracemalloc
from typing import Any

import pytest
import s3fs

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.open import open_filesystem

from .suite import Place, write_file

pytestmark = pytest.mark.s3

PART_NBYTES = 16 << 20


def client_of(store: Place) -> tuple[s3fs.S3FileSystem, str]:
    """A client beside ours, and the bucket."""
    url, options = store
    return s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False), url.split("/")[2]


def unfinished_uploads(store: Place) -> list[Any]:
    client, bucket = client_of(store)
    return list(client.list_multipart_uploads(bucket))


def test_the_user_chooses_the_part_size(s3_store: Place) -> None:
    url, options = s3_store
    filesystem = open_filesystem(url, storage_options={**options, "default_block_size": 5 << 20})
    write_file(filesystem, "large", bytes(21 << 20))
    assert client_of(s3_store)[0].info(f"{url}/large")["ETag"].strip('"').endswith("-5")


def test_parts_grow_so_that_ten_thousand_suffice(s3_store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_nvcomp.storage.objects.s3._PARTS_BEFORE_GROWTH", 2)
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
@pytest.mark.parametrize("at", ["close", "write"])
def test_an_upload_that_fails_commits_nothing(any_s3_store: Place, at: str) -> None:
    url, options = any_s3_store
    filesystem = open_filesystem(url, storage_options=options, deadline_seconds=4)  # moto says 500
    stream = filesystem.open_output("large")
    stream.write(bytes(20 << 20))
    client, bucket = client_of(any_s3_store)
    client.clear_multipart_uploads(bucket)  # as a lifecycle rule may do
    with pytest.raises(StorageError) as caught:
        stream.write(bytes(20 << 20)) if at == "write" else stream.close()
    assert caught.value.path == f"{url}/large"
    if at == "write":
        with pytest.raises(AssertionError):
            stream.close()
    stream.abort()
    assert filesystem.list_names() == [] and unfinished_uploads(any_s3_store) == []


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
