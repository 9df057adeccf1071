"""Object stores: what every Filesystem does there is in test_every_filesystem.py, whole saves are in tests/stores.

The emulators can't show: latency and throttling of the real services, Azure AD, hierarchical namespaces, IAM (what the
emulator of Google's has is ours, after the documentation), tokens that expire, who pays.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import socket
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from google.oauth2.credentials import Credentials
from torch.utils.data import DataLoader

from dcp_nvcomp import open_checkpoint
from dcp_nvcomp.errors import ConcurrentSaveError, ConfigurationError, StorageError
from dcp_nvcomp.storage.objects.azure import AzureContainer
from dcp_nvcomp.storage.objects.bucket import Bucket
from dcp_nvcomp.storage.objects.gcs import GcsBucket
from tests.checkpoints import save
from tests.servers.base import Location
from tests.servers.gcs import GcsServer
from tests.stores.kinds import S3, parameters

from .files import in_parts, opened, part_nbytes, write_file

BUCKETS: dict[str, type[Bucket]] = {"azure": AzureContainer, "gcs": GcsBucket}
LIMIT_SECONDS = 60.0  # ends what hangs


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind_name", parameters(*names), indirect=True)


EVERY, ON_S3, AZURE, GCS = on("moto", "ceph", "azure", "gcs"), on("moto", "ceph"), on("azure"), on("gcs")


@pytest.fixture(params=parameters("azure", "gcs"))
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "CONNECTION_STRING", "ENDPOINT"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)


@pytest.fixture
def bucket(kind_name: str) -> type[Bucket]:
    """Our class for it."""
    return BUCKETS[kind_name]


def random_bytes(nbytes: int) -> bytes:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().tobytes()


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
@EVERY
def test_large_files_are_there_when_they_are_closed(kind: Any, place: Location) -> None:
    filesystem = opened(place)
    stream = filesystem.open_output("large")
    stream.write(bytes(40 << 20))
    assert kind.names(place[0]) == []
    stream.close()
    assert kind.names(place[0]) == ["run/large"] and filesystem.file_nbytes("large") == 40 << 20


@EVERY
def test_a_bucket_itself(kind: Any, place: Location) -> None:
    filesystem = opened((place[0].rpartition("/")[0], place[1]))
    write_file(filesystem, "a", b"1")
    opened(place).publish("b", b"2")
    assert filesystem.list_names() == ["a"]
    assert sorted(file.name for file in filesystem.list_below().files) == ["a", "run/b"]
    assert sorted(kind.names(place[0])) == ["a", "run/b"]


@on("moto", "ceph", "gcs")
def test_folders_of_the_console_are_no_files(kind: Any, place: Location) -> None:
    filesystem = opened(place)
    filesystem.publish("a", b"x")
    for name in ("", "inner/"):
        kind.put(f"{place[0]}/{name}", b"")
    assert filesystem.list_names() == ["a"]
    assert [file.name for file in filesystem.list_below().files] == ["a"]


@EVERY
def test_a_missing_bucket(place: Location) -> None:
    protocol = place[0].partition("://")[0]
    url = f"{protocol}://there-is-no-such-bucket/run"
    filesystem = opened((url, place[1]), deadline_seconds=5)
    filesystem.create_directory()  # a mistyped bucket is not made
    assert filesystem.file_nbytes("a") is None and filesystem.list_names() == []
    assert filesystem.list_below().files == [] and filesystem.list_folders() == []
    for use in (lambda: filesystem.publish("a", b"x"), lambda: write_file(filesystem, "a", b"x")):
        with pytest.raises(StorageError, match=r"(bucket|container) does not exist|NoSuchBucket") as caught:
            use()
        assert f"{url}/a" in str(caught.value) and caught.value.errno == errno.ENOENT


@GCS
@pytest.mark.parametrize("kept", [0, 256 << 10, 512 << 10])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_what_the_server_did_not_keep_is_sent_again(kind: GcsServer, place: Location, skipped: int, kept: int) -> None:
    """Of the first part, of one in the middle, of the last."""
    filesystem = opened(place, default_block_size=1 << 20)
    data = random_bytes((2 << 20) + 700_000)
    stream = filesystem.open_output("a")
    stream.write(data[: skipped << 20])
    kind.request("PUT", f"/keep/{kept}")
    stream.write(data[skipped << 20 :])
    stream.close()
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data


@pytest.mark.ci
@GCS
@pytest.mark.parametrize("parts", [0, 2])
def test_what_arrives_changed_is_never_there(
    kind: GcsServer, place: Location, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """The server compares a checksum; what it refuses is sent again."""
    filesystem = opened(place, deadline_seconds=3, default_block_size=1 << 20)
    data = bytes((parts << 20) + 1000)
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
    assert kind.names(place[0]) == []
    stream.abort()
    write_file(filesystem, "a", data)
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data


@GCS
def test_lists_of_several_pages(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = opened(place)
    expected = sorted(f"file-{number}" for number in range(12))
    filesystem.map(lambda name: write_file(filesystem, name, b"x"), expected)
    opened(place, below="below").publish("deep", b"x")
    asked, address = [], GcsBucket.url

    def short(bucket: GcsBucket, key: str | None = None, **parameters: Any) -> str:
        asked.append(parameters)
        return address(bucket, key, maxResults="5", **parameters)

    monkeypatch.setattr(GcsBucket, "url", short)
    assert filesystem.list_names() == expected and len(asked) == 3
    assert sorted(file.name for file in filesystem.list_below().files) == sorted([*expected, "below/deep"])


# --- S3: parts, uploads and options of its client ---------------------------------------------------------------------


def client_of(kind: S3, place: Location) -> tuple[Any, str]:
    """A client beside ours, and the bucket."""
    kind.client.invalidate_cache()
    return kind.client, place[0].split("/")[2]


def unfinished_uploads(kind: S3, place: Location) -> list[Any]:
    client, bucket = client_of(kind, place)
    return list(client.list_multipart_uploads(bucket))


@on("moto")
@pytest.mark.parametrize(("growing_after", "mebibytes"), [(None, 21), (2, 36)])
def test_sizes_of_parts(
    kind: S3, place: Location, monkeypatch: pytest.MonkeyPatch, growing_after: int | None, mebibytes: int
) -> None:
    """The user chooses them; they grow so that ten thousand suffice: here to parts of 5, 5, 10, 10 and the rest."""
    if growing_after is not None:
        monkeypatch.setattr("dcp_nvcomp.storage.objects.s3._PARTS_BEFORE_GROWTH", growing_after)
    filesystem = opened(place, default_block_size=5 << 20)
    data = bytes(range(256)) * (mebibytes << 12)
    write_file(filesystem, "large", data)
    assert client_of(kind, place)[0].info(f"{place[0]}/large")["ETag"].strip('"').endswith("-5")
    assert filesystem.read("large", 0, len(data)) == data


@on("ceph")
def test_an_upload_takes_few_parts_of_memory(place: Location) -> None:
    filesystem, data = opened(place), bytes(128 << 20)
    tracemalloc.start()
    try:
        write_file(filesystem, "large", data)
        assert tracemalloc.get_traced_memory()[1] < 4 * (16 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.ci
@ON_S3
@pytest.mark.parametrize("ends", ["abort", "close", "write"])
def test_an_upload_that_fails_commits_nothing(kind: S3, place: Location, ends: str) -> None:
    """It is aborted; or its parts are gone when the next one is written or it is closed, as by a lifecycle rule."""
    filesystem = opened(place, deadline_seconds=8)  # moto says 500
    stream = filesystem.open_output("large")
    stream.write(bytes(20 << 20))
    assert len(unfinished_uploads(kind, place)) == 1
    if ends != "abort":
        kind.client.clear_multipart_uploads(place[0].split("/")[2])
        with pytest.raises(StorageError) as caught:
            stream.write(bytes(20 << 20)) if ends == "write" else stream.close()
        assert caught.value.path == f"{place[0]}/large"
    if ends == "write":
        with pytest.raises(AssertionError):
            stream.close()
    stream.abort()
    assert unfinished_uploads(kind, place) == []
    del stream
    gc.collect()
    assert filesystem.list_names() == []


@ON_S3
def test_a_listing_cache_that_the_user_wants_is_not_believed(kind: S3, place: Location) -> None:
    filesystem = opened(place, use_listings_cache=True)
    filesystem.publish("a", b"x")
    assert filesystem.list_names() == ["a"]
    kind.put(f"{place[0]}/b", b"x")
    assert filesystem.list_names() == ["a", "b"]
    kind.put(f"{place[0]}/a", b"longer")
    assert filesystem.file_nbytes("a") == 6
    kind.client.rm_file(f"{place[0]}/a")
    assert filesystem.file_nbytes("a") is None


@ON_S3
def test_unfinished_uploads(kind: S3, place: Location, kind_name: str) -> None:
    """As a killed client leaves them: only those directly in the directory are listed, and aborted."""
    client, bucket = client_of(kind, place)
    filesystem = opened(place, below="step")
    before = filesystem.now_seconds()
    keys = ["run/step/a", "run/step/a", "run/step/b", "run/step/inner/c", "run/step-2/a", "run/a"]
    for key in keys:
        client.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    found = filesystem.list_uploads()
    assert sorted(upload.name for upload in found) == ["a", "a", "b"]
    if kind_name == "ceph":  # moto says 2010 of every upload
        assert all(before - 60 <= upload.begun_seconds <= before + 60 for upload in found)
    filesystem.abort_uploads(found)
    filesystem.abort_uploads(found)  # gone already
    assert sorted(upload["Key"] for upload in unfinished_uploads(kind, place)) == sorted(keys[3:])


@on("moto")
def test_acl_of_all_objects(kind: S3, place: Location) -> None:
    """s3fs itself sends `acl` only with the files that it opens."""
    filesystem = opened(place, s3_additional_kwargs={"acl": "public-read"}, **in_parts(place))
    filesystem.publish("small", b"x")
    write_file(filesystem, "large", bytes((part_nbytes(place) or 0) + 1))
    client, bucket = client_of(kind, place)
    for name in ("small", "large"):
        grants = client.call_s3("get_object_acl", Bucket=bucket, Key=f"run/{name}")["Grants"]
        assert any(grant["Grantee"].get("URI", "").endswith("/AllUsers") for grant in grants), name


@ON_S3
def test_checksums_of_parts(place: Location) -> None:
    filesystem = opened(place, s3_additional_kwargs={"ChecksumAlgorithm": "SHA256"}, **in_parts(place))
    data = random_bytes((11 << 20) + 5)
    write_file(filesystem, "large", data)
    assert filesystem.read("large", 0, len(data)) == data


# --- publishing ------------------------------------------------------------------------------------------------------


def lose_an_answer(bucket: type[Bucket], patch: pytest.MonkeyPatch, *, done: bool, other: Any = None) -> list[str]:
    """Let the first conditional write fail, done or not, and another save come in between; return what was written."""
    sent, put = list[str](), bucket.put_over

    async def failing(bucket: Bucket, key: str, data: bytes, version: str | None) -> None:
        sent.append(key)
        if len(sent) > 1 or done:
            await put(bucket, key, data, version)
        if len(sent) > 1:
            return
        if other is not None:
            other()
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    patch.setattr(bucket, "put_over", failing)
    return sent


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_a_write_without_an_answer_is_repeated_unless_it_was_done(
    place: Location, bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch, done: bool, overwrite: bool
) -> None:
    filesystem = opened(place)
    if overwrite:
        filesystem.publish("a", b"old")
    sent = lose_an_answer(bucket, monkeypatch, done=done)
    filesystem.publish("a", b"new", overwrite=overwrite)
    assert len(sent) == (1 if done else 2) and filesystem.read_all("a", limit_nbytes=9) == b"new"


@pytest.mark.parametrize("done", [True, False])
def test_what_another_save_published_meanwhile_stays(
    kind: Any, place: Location, bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """Whether ours was there before it is not known, so neither is whether our files may still be named."""
    filesystem = opened(place)
    filesystem.publish("a", b"old")
    sent = lose_an_answer(bucket, monkeypatch, done=done, other=lambda: kind.put(f"{place[0]}/a", b"theirs"))
    with pytest.raises(ConcurrentSaveError) as caught:
        filesystem.publish("a", b"ours")
    assert caught.value.outcome_unknown and len(sent) == 1
    assert filesystem.read_all("a", limit_nbytes=9) == b"theirs"


def test_what_another_save_publishes_after_the_look_stays(
    kind: Any, place: Location, bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The condition refuses what is sent again."""
    filesystem = opened(place)
    filesystem.publish("a", b"old")
    sent = lose_an_answer(bucket, monkeypatch, done=False)
    head, looked = bucket.head, list[str]()

    async def head_and_then(bucket: Bucket, key: str) -> Any:
        found = await head(bucket, key)
        looked.append(key)
        if len(looked) == 2:  # the first look was before the first write
            kind.put(f"{place[0]}/a", b"theirs")
        return found

    monkeypatch.setattr(bucket, "head", head_and_then)
    with pytest.raises(ConcurrentSaveError) as caught:
        filesystem.publish("a", b"ours")
    assert caught.value.outcome_unknown and len(sent) == 2
    assert filesystem.read_all("a", limit_nbytes=9) == b"theirs"


@AZURE
@pytest.mark.parametrize("unsure", [True, False])
def test_a_refusal_that_does_not_pass_is_reported_at_once(
    kind: Any, place: Location, monkeypatch: pytest.MonkeyPatch, unsure: bool
) -> None:
    """The version is what it was: it was not another save. But a PUT before it that got no answer may be done yet."""
    filesystem = opened(place)
    filesystem.publish("a", b"old")
    with kind.service() as service:
        lease = service.get_blob_client(place[0].split("/")[2], "run/a").acquire_lease()
        if unsure:
            lose_an_answer(AzureContainer, monkeypatch, done=False)
        began = time.monotonic()
        with pytest.raises(StorageError, match="LeaseIdMissing") as caught:
            filesystem.publish("a", b"new")
        assert time.monotonic() - began < 20
        assert caught.value.outcome_unknown == unsure
        assert filesystem.read_all("a", limit_nbytes=9) == b"old"
        lease.release()
    filesystem.publish("a", b"new")
    assert filesystem.read_all("a", limit_nbytes=9) == b"new"


# --- trouble ---------------------------------------------------------------------------------------------------------


def _with_wrong_credentials(kind_name: str, place: Location) -> list[dict[str, Any]]:
    if kind_name == "ceph":
        return [{**place[1], "secret": "wrong"}]
    if kind_name == "azure":
        return [{**place[1], "account_key": "QUJDREVGRw=="}]
    tokens = [Credentials(token) for token in ("nobody", "only:list")]  # type: ignore[no-untyped-call]
    return [{**place[1], "token": token} for token in tokens]


@on("ceph", "azure", "gcs")
def test_wrong_credentials_are_not_tried_again(place: Location, kind_name: str) -> None:
    for options in _with_wrong_credentials(kind_name, place):
        filesystem = opened((place[0], options))
        for use in (lambda: filesystem.publish("a", b"x"), lambda: filesystem.read("a", 0, 1)):
            began = time.monotonic()
            with pytest.raises(StorageError) as caught:
                use()
            assert time.monotonic() - began < 20 and caught.value.errno == errno.EACCES
            assert not caught.value.outcome_unknown


@GCS
def test_a_server_that_is_started_again(kind: GcsServer, place: Location) -> None:
    """Meanwhile an upload waits, and goes on where the server has it."""
    filesystem = opened(place, default_block_size=1 << 20)
    data = random_bytes((5 << 20) + 5)
    stream = filesystem.open_output("a")
    stream.write(data[: 3 << 20])
    kind.kill()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(stream.write, data[3 << 20 :])
        time.sleep(0.3)
        kind.start()
        writing.result()
    stream.close()
    kind.kill()
    kind.start()
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data


_WITHOUT_A_SERVER = {
    "s3": lambda address: {"key": "ci", "secret": "cisecret", "endpoint_url": address},
    "az": lambda address: {"account_name": "ckpt", "account_key": "QUJD", "endpoint": f"{address}/ckpt"},
    "gs": lambda address: {"token": "anon", "endpoint_url": address},
}


@pytest.mark.ci
@pytest.mark.parametrize("listening", [True, False])
@pytest.mark.parametrize("protocol", _WITHOUT_A_SERVER)
def test_no_server(protocol: str, listening: bool) -> None:
    """The port is closed, or nothing ever answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen(100)
        options = _WITHOUT_A_SERVER[protocol](f"http://127.0.0.1:{server.getsockname()[1]}")
        # among the storage options, as the commands pass it on
        filesystem = opened((f"{protocol}://c/run", {**options, "storage_deadline_seconds": 3}))
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
            assert time.monotonic() - start < 12
            return caught.value

        with ThreadPoolExecutor(len(uses)) as pool:
            for error in pool.map(failing, uses):
                assert error.errno == errno.ETIMEDOUT and f"{protocol}://c/run" in str(error)


# --- forked processes -------------------------------------------------------------------------------------------------


def _error_in_child(do: Callable[[], Any]) -> str:
    """Return the words of the ConfigurationError that a function raises in a forked child."""

    def run() -> None:
        with pytest.raises(ConfigurationError) as caught:
            do()
        sending.send(str(caught.value))

    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    sending.close()
    try:
        assert receiving.poll(LIMIT_SECONDS), "the child hangs"
        return str(receiving.recv())
    finally:
        child.kill()
        child.join()


def test_a_forked_child_is_refused_what_its_parent_opened(place: Location, kind_name: str) -> None:
    """It would wait for threads that it does not have; obstore's can't even be opened again there."""
    filesystem = opened(place)
    unfinished = filesystem.open_output("unfinished")
    unfinished.write(bytes(40 << 20))
    of_ours = "was opened by the process that this one was forked from"
    assert of_ours in _error_in_child(lambda: filesystem.read("a", 0, 1))
    if kind_name == "azure":
        assert "forkserver" in _error_in_child(lambda: unfinished.write(bytes(40 << 20)))
        assert "forkserver" in _error_in_child(lambda: opened(place))
    unfinished.close()
    assert filesystem.file_nbytes("unfinished") == 40 << 20


@AZURE
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_the_workers_of_a_data_loader(place: Location, context: str) -> None:
    url, options = place
    state = {"w": torch.arange(3 << 20), "b": torch.ones(5)}
    save(url, state, **options)
    with open_checkpoint(url, **options) as checkpoint:
        assert torch.equal(checkpoint["b"][:], state["b"])
        loader: Any = DataLoader(
            checkpoint.dataset(),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=context,
            timeout=LIMIT_SECONDS,
        )
        if context == "fork":
            with pytest.raises(ConfigurationError, match="forkserver"):
                dict(loader)
            return
        found = dict(loader)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


# --- Google's options that the server sees ----------------------------------------------------------------------------


@GCS
def test_requester_pays(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, exchange = [], GcsBucket._exchange

    async def noting(client: GcsBucket, method: str, address: str, *more: Any) -> Any:
        asked.append(address)
        return await exchange(client, method, address, *more)

    monkeypatch.setattr(GcsBucket, "_exchange", noting)
    for pays, expected in ((True, "mine"), ("other", "other")):
        filesystem = opened(place, project="mine", requester_pays=pays)
        filesystem.publish("a", b"x")
        assert filesystem.list_names() == ["a"] and filesystem.read("a", 0, 1) == b"x"
        assert asked and all(f"userProject={expected}" in address for address in asked)
        asked.clear()
