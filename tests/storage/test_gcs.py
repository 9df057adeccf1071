"""Google Cloud Storage: what test_objects.py does not have of it, on gcp-storage-emulator.

The emulator and what tests/servers/gcs_emulator.py adds to it can't show: the latency of the real service, that it
slows down who writes one object more than once a second, IAM (its rights are ours, after Google's documentation),
tokens that expire, who pays, buckets with a hierarchical namespace.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
import torch
from google.oauth2.credentials import Credentials

from dcp_nvcomp.errors import ConfigurationError, StorageError
from dcp_nvcomp.storage.objects.gcs import GcsBucket, gcs_place
from dcp_nvcomp.storage.open import open_filesystem, real_place
from tests.servers.gcs import GcsServer

from .suite import Place, write_file

pytestmark = pytest.mark.gcs

SECRET = "S3cretS3cretS3cret"
PART_NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "GCSFS_DEFAULT_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def in_parts(store: Place) -> Place:
    """Return a store that takes uploads in parts of a MiB."""
    return store[0], {**store[1], "default_block_size": PART_NBYTES}


def names(server: GcsServer, store: Place) -> list[str]:
    return [found["name"] for found in server.objects(store[0])]


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, PART_NBYTES - 1, PART_NBYTES, PART_NBYTES + 1, 3 * PART_NBYTES])
def test_files_about_the_length_of_parts(gcs_store: Place, nbytes: int) -> None:
    url, options = in_parts(gcs_store)
    filesystem = open_filesystem(url, storage_options=options)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().tobytes()
    write_file(filesystem, "a", data)
    assert filesystem.read_all("a", limit_nbytes=nbytes) == data


@pytest.mark.parametrize("kept", [0, 256 << 10, 512 << 10])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_what_the_server_did_not_keep_is_sent_again(
    gcs_server: GcsServer, gcs_store: Place, skipped: int, kept: int
) -> None:
    """Of the first part, of one in the middle, of the last."""
    url, options = in_parts(gcs_store)
    filesystem = open_filesystem(url, storage_options=options)
    data = torch.randint(0, 256, (2 * PART_NBYTES + 700_000,), dtype=torch.uint8).numpy().tobytes()
    stream = filesystem.open_output("a")
    stream.write(data[: skipped * PART_NBYTES])
    gcs_server.request("PUT", f"/keep/{kept}")
    stream.write(data[skipped * PART_NBYTES :])
    stream.close()
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data


@pytest.mark.ci
@pytest.mark.parametrize("parts", [0, 2])
def test_what_arrives_changed_is_never_there(
    gcs_server: GcsServer, gcs_store: Place, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """The server compares a checksum; what it refuses is sent again."""
    url, options = in_parts(gcs_store)
    filesystem = open_filesystem(url, storage_options=options, deadline_seconds=3)
    data = bytes(parts * PART_NBYTES + 1000)
    exchange = GcsBucket._exchange

    async def changing(client: GcsBucket, method: str, address: str, headers: Any, body: bytes | None) -> Any:
        if body:
            body = body.replace(bytes(500), b"x" * 500, 1)
        return await exchange(client, method, address, headers, body)

    stream = filesystem.open_output("a")
    with monkeypatch.context() as patch:
        patch.setattr(GcsBucket, "_exchange", changing)
        stream.write(data)
        with pytest.raises(StorageError, match="match calculated"):
            stream.close()
    assert names(gcs_server, gcs_store) == []
    stream.abort()
    write_file(filesystem, "a", data)
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data


def test_lists_of_several_pages(gcs_store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = gcs_store
    filesystem = open_filesystem(url, storage_options=options)
    expected = sorted(f"file-{number}" for number in range(12))
    filesystem.map(lambda name: write_file(filesystem, name, b"x"), expected)
    open_filesystem(f"{url}/below", storage_options=options).publish("deep", b"x")
    asked, address = [], GcsBucket.url

    def short(bucket: GcsBucket, key: str | None = None, **parameters: Any) -> str:
        asked.append(parameters)
        return address(bucket, key, maxResults="5", **parameters)

    monkeypatch.setattr(GcsBucket, "url", short)
    assert filesystem.list_names() == expected and len(asked) == 3
    assert sorted(file.name for file in filesystem.list_below().files) == sorted([*expected, "below/deep"])


# --- trouble ---------------------------------------------------------------------------------------------------------


def test_a_server_that_is_started_again(tmp_path: Path) -> None:
    """Meanwhile an upload waits, and goes on where the server has it."""
    server = GcsServer(tmp_path)
    server.start()
    try:
        url, options = in_parts(server.place("run"))
        filesystem = open_filesystem(url, storage_options=options)
        data = torch.randint(0, 256, (5 * PART_NBYTES + 5,), dtype=torch.uint8).numpy().tobytes()
        stream = filesystem.open_output("a")
        stream.write(data[: 3 * PART_NBYTES])
        server.kill()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(stream.write, data[3 * PART_NBYTES :])
            time.sleep(0.3)
            server.start()
            writing.result()
        stream.close()
        server.kill()
        server.start()
        assert filesystem.read_all("a", limit_nbytes=len(data)) == data
    finally:
        server.stop()


def with_token(store: Place, token: str) -> dict[str, Any]:
    return {**store[1], "token": Credentials(token)}  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("token", ["nobody", "only:list"])
def test_a_refusal_is_not_repeated(gcs_store: Place, token: str) -> None:
    options = with_token(gcs_store, token)
    filesystem = open_filesystem(gcs_store[0], storage_options=options, deadline_seconds=60)
    for use in (lambda: filesystem.publish("a", b"x"), lambda: filesystem.read("a", 0, 1)):
        start = time.monotonic()
        with pytest.raises(StorageError, match=r"Invalid Credentials|storage\.objects\.") as caught:
            use()
        assert time.monotonic() - start < 20 and caught.value.errno == errno.EACCES
        assert not caught.value.outcome_unknown


# --- options ---------------------------------------------------------------------------------------------------------


def test_urls() -> None:
    for url, bucket, prefix in (("gs://b/a/b", "b", "a/b"), ("gs://b", "b", ""), ("gcs://b/a/", "b", "a")):
        place = gcs_place(url, {})
        assert (place.bucket, place.prefix) == (bucket, prefix)
    assert real_place("gcs://b/a/") == real_place("gs://b/a") == "gs://b/a"
    assert real_place("gs://b/") == real_place("gs://b") == "gs://b"


def test_fsspecs_files_and_the_environment(gcs_store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = gcs_store
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", options["endpoint_url"])
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    filesystem = open_filesystem(url)
    filesystem.publish("a", b"x")
    assert open_filesystem(url, storage_options=options).list_names() == ["a"]
    monkeypatch.setitem(fsspec.config.conf, "gs", {"tokn": "anon"})
    with pytest.raises(ConfigurationError, match="token"):
        open_filesystem(url)


def test_requester_pays(gcs_store: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, exchange = [], GcsBucket._exchange

    async def noting(client: GcsBucket, method: str, address: str, *more: Any) -> Any:
        asked.append(address)
        return await exchange(client, method, address, *more)

    monkeypatch.setattr(GcsBucket, "_exchange", noting)
    for pays, expected in ((True, "mine"), ("other", "other")):
        options = {**gcs_store[1], "project": "mine", "requester_pays": pays}
        filesystem = open_filesystem(gcs_store[0], storage_options=options)
        filesystem.publish("a", b"x")
        assert filesystem.list_names() == ["a"] and filesystem.read("a", 0, 1) == b"x"
        assert asked and all(f"userProject={expected}" in address for address in asked)
        asked.clear()


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["dict", "header"])
def test_no_secret_is_told(kind: str) -> None:
    token: Any = Credentials("first" if kind == "header" else SECRET)  # type: ignore[no-untyped-call]
    if kind == "dict":
        token = {"refresh_token": SECRET, "client_secret": f"{SECRET}2", "client_id": "i"}
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        if kind == "header":
            threading.Thread(target=_answer_nonsense, args=(server,), daemon=True).start()
        options = {"token": token, "endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}"}
        filesystem = open_filesystem("gs://b/a", storage_options=options, deadline_seconds=2)
        if kind == "header":
            token.token = SECRET  # as when it is renewed: nobody has told what to hide
        with pytest.raises(StorageError) as caught:
            filesystem.file_nbytes("x")
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__


def _answer_nonsense(server: socket.socket) -> None:
    """Answer what aiohttp can't read: it raises an error that has the headers of the request."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 what?\r\n\r\n")
