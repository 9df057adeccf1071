"""Faults between us and an S3 server: a save ends complete or invisible, a load bit-exact or with an error."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest
import s3fs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from dcp_nvcomp.storage.s3.client import S3Client
from tests.checkpoints import save
from tests.distributed.launch import RankPool, ranks
from tests.faults import forked
from tests.states import assert_same, blank

from .proxy import FaultProxy

__all__ = ["ranks"]

pytestmark = [pytest.mark.s3]

Store = tuple[str, dict[str, Any]]
PARTS = {"default_block_size": 5 << 20}


@dataclass
class Wire:
    """A fresh directory on a server, and the proxy before it."""

    proxy: FaultProxy
    url: str
    direct: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        return {**self.direct, "endpoint_url": self.proxy.url}

    def save(self, state: dict[str, Any], *, deadline: float = 30, **options: Any) -> None:
        save(self.url, state, storage_deadline_seconds=deadline, **{**self.options, **options})

    def load(self, *, direct: bool = False, deadline: float = 30) -> dict[str, Any]:
        options = self.direct if direct else self.options
        return load(NvcompReader(self.url, storage_deadline_seconds=deadline, **options))

    def names(self) -> set[str]:
        return set(self.filesystem(direct=True).list_names())

    def filesystem(self, *, direct: bool = False, deadline: float = 30) -> Filesystem:
        options = self.direct if direct else self.options
        return open_filesystem(self.url, storage_options=options, deadline_seconds=deadline)


def load(reader: NvcompReader) -> dict[str, Any]:
    try:
        metadata = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        metadata = {}
    into: dict[str, Any] = blank(state_of_seed(0, large="large" in metadata))
    dcp.load(into, storage_reader=reader, no_dist=True)
    return into


def state_of_seed(seed: int, *, large: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        "w": torch.randn(1 << 18, generator=generator),
        "b": torch.full((100,), seed % 256, dtype=torch.uint8),
        "seed": seed,
    }
    if large:
        made["large"] = torch.randint(0, 256, (11 << 20,), generator=generator, dtype=torch.uint8)
    return made


def cause_of(error: Exception) -> BaseException:
    return error.failures[0][0] if isinstance(error, dcp.CheckpointException) else error


def unfinished(store: Store) -> list[Any]:
    url, options = store
    client = s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
    return list(client.list_multipart_uploads(url.split("/")[2]))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry after 10 ms instead of 100: these tests wait for what is retried, not for the pauses between."""
    quick = functools.partial(S3Client, first_pause_seconds=0.01)
    monkeypatch.setattr("dcp_nvcomp.storage.s3.filesystem.S3Client", quick)


@pytest.fixture
def wire(any_s3_store: Store) -> Iterator[Wire]:
    url, options = any_s3_store
    with FaultProxy(options["endpoint_url"], seed=4) as proxy:
        yield Wire(proxy, url, options)


@pytest.mark.ci
@pytest.mark.parametrize(
    "rates",
    [
        {"unavailable": 0.2},
        pytest.param({"unavailable": 0.4}, marks=pytest.mark.slow),
        pytest.param({"reset": 0.2, "lost": 0.2}, marks=pytest.mark.slow),
        pytest.param({"broken": 0.2, "lost": 0.2, "unavailable": 0.2}, marks=pytest.mark.slow),
        {"truncated": 0.3, "shortened": 0.3},
    ],
    ids=str,
)
def test_a_bad_network_is_survived(wire: Wire, rates: dict[str, float]) -> None:
    wire.save(state_of_seed(1))
    wire.proxy.rates = rates
    for seed in (2, 3):
        wire.save(state_of_seed(seed), thread_count=1)
        for _ in range(3):
            assert_same(wire.load(), state_of_seed(seed))
    wire.proxy.rates = {}
    assert_same(wire.load(direct=True), state_of_seed(3))
    assert all(wire.proxy.counts[fault] for fault in rates), wire.proxy.counts
    assert len(wire.names()) == 3  # nothing of the checkpoints that were replaced
    assert unfinished((wire.url, wire.direct)) == []


@pytest.mark.ci
@pytest.mark.parametrize("rate", [0.2, pytest.param(0.05, marks=pytest.mark.slow)])
def test_flipped_bits_are_never_loaded(wire: Wire, rate: float) -> None:
    wire.proxy.rates = {"flipped": rate}
    outcomes = list[BaseException | None]()
    for seed in range(3):
        wire.save(state_of_seed(seed))  # its own reads must not mislead it
        for _ in range(5):
            try:
                found = wire.load()
            except (dcp.CheckpointException, errors.CheckpointError) as error:
                outcomes.append(cause_of(error))
            else:
                assert_same(found, state_of_seed(seed))
                outcomes.append(None)
    wire.proxy.rates = {}
    assert_same(wire.load(direct=True), state_of_seed(2))
    assert wire.proxy.counts["flipped"] > 0 and None in outcomes
    raised = [outcome for outcome in outcomes if not (outcome is None or isinstance(outcome, errors.CheckpointError))]
    assert all("`.metadata` fails its CRC" in str(error) for error in raised), raised  # in DCP's own words


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_flipped_is_read_again(wire: Wire, count: int) -> None:
    """Once the footer alone, which is read first, then blocks too."""
    wire.save(state_of_seed(1))
    for number in range(count):
        wire.proxy.next("flipped", method="GET", path=".distcp", skip=number)
    assert_same(wire.load(), state_of_seed(1))
    assert wire.proxy.counts["flipped"] == count


@pytest.mark.ci
@pytest.mark.parametrize(
    ("method", "path", "overwrite"),
    [
        ("PUT", ".distcp", True),
        ("PUT", "/.metadata", True),
        ("PUT", "/.metadata", False),
        ("POST", "uploads", True),
        ("PUT", "partNumber=2", True),
        ("POST", "uploadId=", True),
        ("DELETE", ".distcp", True),
        ("HEAD", "/.metadata", False),
    ],
)
def test_a_lost_reply(wire: Wire, method: str, path: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server did it, the client did not hear so, and asks again."""
    # a busy server may take longer to list uploads than a save waits for leftovers, which are then warned of
    monkeypatch.setattr("dcp_nvcomp.storage.attempts._REMOVAL_SECONDS", 30.0)
    large = path in ("uploads", "partNumber=2", "uploadId=")
    if overwrite:
        wire.save(state_of_seed(1))
    wire.proxy.next("lost", method=method, path=path)
    wire.save(state_of_seed(2, large=large), overwrite=overwrite, thread_count=1, **(PARTS if large else {}))
    assert wire.proxy.counts["lost"] == 1
    assert_same(wire.load(direct=True), state_of_seed(2, large=large))
    assert len(wire.names()) == 3
    assert unfinished((wire.url, wire.direct)) == []


@pytest.mark.ci
@pytest.mark.parametrize("completed", [True, False])
def test_an_upload_that_is_gone_was_completed_if_the_file_is_there(wire: Wire, completed: bool) -> None:
    """AWS's answer to a completion that is repeated; Ceph and moto say again that all is well."""
    filesystem, data = open_filesystem(wire.url, storage_options={**wire.options, **PARTS}), bytes(11 << 20)
    stream = filesystem.open_output("large")
    stream.write(data)
    if completed:
        wire.proxy.next("lost", method="POST", path="uploadId=")
    wire.proxy.next("gone", method="POST", path="uploadId=", skip=int(completed))
    if completed:
        stream.close()
        assert filesystem.file_nbytes("large") == len(data)
    else:
        with pytest.raises(errors.StorageError):
            stream.close()
        stream.abort()
        assert filesystem.list_names() == []
    assert wire.proxy.counts["gone"] == 1
    assert unfinished((wire.url, wire.direct)) == []


@pytest.mark.slow
def test_a_silent_server_is_asked_again(wire: Wire) -> None:
    wire.proxy.next("silent", method="PUT", path=".distcp")
    wire.proxy.next("silent", method="GET", path=".metadata")
    began = time.monotonic()
    wire.save(state_of_seed(1), deadline=9)
    assert_same(wire.load(deadline=9), state_of_seed(1))
    assert wire.proxy.counts["silent"] == 2
    assert time.monotonic() - began > 5  # a third of the deadline each


@pytest.mark.ci
def test_a_refusal_is_not_retried(wire: Wire) -> None:
    filesystem = wire.filesystem()
    before = wire.proxy.counts["requests"]
    with pytest.raises(errors.StorageError) as caught:
        filesystem.read("missing", 0, 1)
    assert caught.value.errno == errno.ENOENT and caught.value.attempts == 1
    assert wire.proxy.counts["requests"] == before + 1
    assert not caught.value.outcome_unknown


@pytest.mark.ci
def test_an_outage_ends_with_the_attempts_and_the_seconds(wire: Wire) -> None:
    wire.proxy.rates = {"unavailable": 1}
    filesystem = wire.filesystem(deadline=1.5)
    stream = filesystem.open_output("a")
    stream.write(b"x")
    began = time.monotonic()
    with pytest.raises(errors.StorageError, match=r"Could not write: .*, after \d+ attempts in \d+ s") as caught:
        stream.close()
    assert time.monotonic() - began < 30
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.attempts, again.outcome_unknown, str(again)) == (caught.value.attempts, True, str(caught.value))
    assert again.attempts == wire.proxy.counts["unavailable"] >= 3
    assert again.path == f"{wire.url}/a"
    stream.abort()


@pytest.mark.ci
def test_no_request_outlives_its_deadline(wire: Wire) -> None:
    wire.proxy.rates = {"silent": 1}
    filesystem = wire.filesystem(deadline=0.6)
    with warnings.catch_warnings(record=True) as told, ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        for number in range(8):
            pool.submit(pytest.raises, errors.StorageError, filesystem.read, f"file-{number}", 0, 1)
        pool.shutdown()
        gc.collect()
    assert [str(warning.message) for warning in told] == []
    assert not [task for task in asyncio.all_tasks(fsspec.asyn.get_loop()) if "_perform" in repr(task)]


@pytest.mark.ci
def test_what_lands_after_the_deadline_is_whole(wire: Wire) -> None:
    """A publish that was never answered may be done later: its files must still be there then."""
    wire.save(state_of_seed(1))
    before = wire.filesystem(direct=True).read_all(".metadata", limit_nbytes=1 << 20)
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="PUT", path="/.metadata")
    wire.proxy.next("unavailable", method="PUT", path="/.metadata", times=1000)
    with pytest.raises(dcp.CheckpointException) as caught:
        wire.save(state_of_seed(2), deadline=5)
    cause = cause_of(caught.value)
    assert isinstance(cause, errors.StorageError) and cause.outcome_unknown
    assert wire.filesystem(direct=True).read_all(".metadata", limit_nbytes=1 << 20) == before
    wire.proxy.land()
    assert wire.filesystem(direct=True).read_all(".metadata", limit_nbytes=1 << 20) != before
    assert_same(wire.load(direct=True), state_of_seed(2))


@pytest.mark.parametrize("refuses", [False, True], ids=["conditions", "no conditions"])
def test_an_attempt_is_not_repeated_over_another_save(wire: Wire, refuses: bool) -> None:
    """Its first attempt arrived, another save replaced that and removed its files: it must not come back."""
    wire.proxy.refuses_conditions = refuses
    ours, other = wire.filesystem(), wire.filesystem(direct=True)
    other.publish(".metadata", b"an old one")
    wire.proxy.next("lost", method="PUT", path="/.metadata", times=2)  # aiohttp sends some a second time by itself
    # from the second attempt's first request on, until the other save has published
    outage = wire.proxy.next("unavailable", method="HEAD", path="/.metadata", times=1 << 30, skip=1)

    def interfere() -> None:
        end = time.monotonic() + 30
        while not wire.proxy.counts["unavailable"]:
            assert time.monotonic() < end, "the attempt was repeated without a look"
            time.sleep(0.001)
        other.publish(".metadata", b"the other's")
        outage.end()

    with ThreadPoolExecutor(1) as pool:
        interfering = pool.submit(interfere)
        with pytest.raises(errors.ConcurrentSaveError) as caught:
            ours.publish(".metadata", b"ours")
        interfering.result()
    assert caught.value.outcome_unknown
    assert other.read_all(".metadata", limit_nbytes=100) == b"the other's"


@pytest.mark.parametrize("fresh", [True, False])
def test_a_late_publish_does_not_land_over_another(wire: Wire, fresh: bool) -> None:
    """An attempt that nobody answered and that is done much later, when its save is over and replaced by another."""
    if not fresh:
        wire.save(state_of_seed(1))
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="PUT", path="/.metadata")
    wire.save(state_of_seed(2))
    assert wire.proxy.counts["late"] == 1
    save(wire.url, state_of_seed(3), **wire.direct)
    wire.proxy.land()
    assert_same(wire.load(direct=True), state_of_seed(3))


def test_who_came_second_may_have_less_metadata(any_s3_store: Store) -> None:
    url, options = any_s3_store
    one, other = (open_filesystem(url, storage_options=options) for _ in range(2))
    for publisher, name in ((one, "one"), (other, "other")):
        publisher.publish(name, b"a file of its own")
    one.publish("metadata", b"x" * 1000, overwrite=False)
    with pytest.raises(errors.ConcurrentSaveError):
        other.publish("metadata", b"y", overwrite=False)


def test_credentials_that_may_neither_list_nor_look(any_s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 403, not 404, to who asks for a missing object and may not list."""
    from botocore.exceptions import ClientError

    url, options = any_s3_store
    real = S3Client.send

    async def send(self: S3Client, operation: str, **parameters: Any) -> dict[str, Any]:
        if operation in ("head_object", "list_objects_v2", "list_multipart_uploads"):
            reply = {"Error": {"Code": "403"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
            raise PermissionError(13, "Forbidden") from ClientError(reply, operation)
        return await real(self, operation, **parameters)

    for number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(S3Client, "send", send)
            save(url, state_of_seed(number), **options)
        assert_same(load(NvcompReader(url, **options)), state_of_seed(number))


@pytest.mark.ci
def test_one_of_two_conditional_publishers_wins(any_s3_store: Store) -> None:
    url, options = any_s3_store
    stores = [open_filesystem(url, storage_options=options) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for round_ in range(12):
            start = threading.Barrier(3)

            def publish(number: int, name: str, start: threading.Barrier) -> bool:
                stores[number].publish(f"{name}-{number}", b"a file of its own")
                start.wait(120)
                try:
                    stores[number].publish(name, bytes([number]), overwrite=False)
                except errors.ConcurrentSaveError:
                    return False
                return True

            name = f"metadata-{round_}"
            won = list(pool.map(publish, range(3), [name] * 3, [start] * 3))
            assert sum(won) == 1, won
            assert stores[0].read_all(name, limit_nbytes=10) == bytes([won.index(True)])


def test_a_lost_conditional_reply(wire: Wire) -> None:
    """The retry is refused with 412, because the first attempt was done: ours is there, so it has won."""
    filesystem = wire.filesystem()
    filesystem.publish("mine", b"x")
    wire.proxy.next("lost", method="PUT", path="/.metadata")
    filesystem.publish(".metadata", b"ours", overwrite=False)
    assert wire.proxy.counts["lost"] == 1
    assert filesystem.read_all(".metadata", limit_nbytes=10) == b"ours"


def test_a_server_that_ignores_conditions_is_found_out(s3_store: Store) -> None:
    """On moto only: which checks no signatures, and so does not miss the header that the proxy takes away."""
    with FaultProxy(s3_store[1]["endpoint_url"]) as proxy:
        proxy.swallowed = ("if-none-match",)
        wire = Wire(proxy, *s3_store)
        with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
            wire.save(state_of_seed(1), overwrite=False)
        filesystem = wire.filesystem()
        filesystem.publish("mine", b"x")
        with pytest.raises(errors.ConcurrentSaveError):
            filesystem.publish(".metadata", b"x", overwrite=False)
        assert_same(wire.load(), state_of_seed(1))


def test_a_server_that_refuses_conditions(wire: Wire) -> None:
    wire.proxy.refuses_conditions = True
    with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
        wire.save(state_of_seed(1), overwrite=False)
    filesystem = wire.filesystem()
    for witness in ("none", "mine"):
        with pytest.raises(errors.ConcurrentSaveError):
            filesystem.publish(".metadata", b"x", overwrite=False)
        filesystem.publish(witness, b"x")
    with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
        filesystem.publish("new", b"x", overwrite=False)
    assert_same(wire.load(), state_of_seed(1))


KILLED = """
import os, signal, sys
from dcp_nvcomp.storage.open import open_filesystem
stream = open_filesystem(sys.argv[1], storage_options=eval(sys.argv[2])).open_output("__0_0_dead.distcp")
stream.write(bytes(40 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_clients_upload_does_no_harm_and_can_be_ended(any_s3_store: Store) -> None:
    url, options = any_s3_store
    save(url, state_of_seed(1), **options)
    killed = forked.execute(KILLED, url, repr(options))
    assert killed.returncode == -signal.SIGKILL
    filesystem = open_filesystem(url, storage_options=options)
    assert [upload.name for upload in filesystem.list_uploads()] == ["__0_0_dead.distcp"]
    assert_same(load(NvcompReader(url, **options)), state_of_seed(1))
    save(url, state_of_seed(2), **options)
    assert_same(load(NvcompReader(url, **options)), state_of_seed(2))
    assert len(filesystem.list_names()) == 3
    filesystem.abort_uploads(filesystem.list_uploads())
    assert filesystem.list_uploads() == []


def _save_and_load_dead(url: str, options: dict[str, Any]) -> float:
    began = time.monotonic()
    writer = NvcompWriter(url, storage_deadline_seconds=2, **options)
    reader = NvcompReader(url, storage_deadline_seconds=2, **options)
    for act in (
        lambda: dcp.save(state_of_seed(1), storage_writer=writer),
        lambda: dcp.load(state_of_seed(1), storage_reader=reader),
    ):
        with pytest.raises(dcp.CheckpointException) as caught:
            act()
        for cause, _ in caught.value.failures.values():
            # DCP swallows what reading `.metadata` raised, and quotes it in an AssertionError
            assert isinstance(cause, errors.StorageError) or "metadata read failed" in str(cause), caught.value
            assert re.search(r"after \d+ attempts in \d+ s", str(cause)), cause
        total = torch.tensor([1])
        dist.all_reduce(total)
        assert int(total) == 2
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refuses", "silent"])
def test_a_dead_server_fails_every_rank_in_time(ranks: RankPool, how: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if how == "silent":
            server.listen(100)
        options = {"endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}", "key": "ci", "secret": "cisecret"}
        seconds = ranks.run(_save_and_load_dead, "s3://bucket/run", options, world_size=2)
    assert max(seconds) < 60, seconds


@pytest.fixture
def own_ceph(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A Ceph of this test's own, as its directory and endpoint: its S3 server can be killed."""
    if "DCP_NVCOMP_TEST_S3" not in os.environ or shutil.which("radosgw") is None:
        pytest.skip("needs Ceph's programs; .ci/run installs them")
    directory = tmp_path / "ceph"
    up = subprocess.run([CI / "ceph_up.sh", directory, "0"], check=True, capture_output=True, text=True, timeout=280)
    yield directory, up.stdout.splitlines()[-1]
    subprocess.run([CI / "ceph_down.sh", directory], check=True, timeout=120)


CI = Path(__file__).resolve().parents[2] / ".ci"


@pytest.mark.slow
def test_a_server_killed_and_restarted_during_a_save(own_ceph: tuple[Path, str]) -> None:
    directory, endpoint = own_ceph
    options = {"endpoint_url": endpoint, "key": "ci", "secret": "cisecret"}
    client = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    client.mkdir("restarts")
    url = "s3://restarts/run"
    save(url, state_of_seed(1, large=True), **options)
    pid_file = directory / "run" / "client.rgw.pid"

    def save_often() -> None:
        writer = NvcompWriter(url, storage_deadline_seconds=120, **options, **PARTS)
        for seed in range(2, 12):
            dcp.save(state_of_seed(seed, large=True), storage_writer=writer, no_dist=True)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_often)
        for _ in range(2):
            time.sleep(1)
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
            time.sleep(3)
            environment = {**os.environ, "CEPH_CONF": str(directory / "ceph.conf")}
            subprocess.run(["radosgw", "--name", "client.rgw"], env=environment, check=True, timeout=60)
        assert not saving.done(), "the save was over before the server was killed"
        saving.result(200)
    assert_same(load(NvcompReader(url, **options)), state_of_seed(11, large=True))
