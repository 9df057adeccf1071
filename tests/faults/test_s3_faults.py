"""Faults between us and an S3 server: a save ends complete or invisible, a load bit-exact or with an error."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest
import s3fs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.storage.objects.s3 import S3Bucket
from tests.checkpoints import assert_loads, save
from tests.distributed.launch import RankPool, ranks

from .object_stores import PART_NBYTES, Wire, cause_of, on, wired

__all__ = ["ranks"]

pytestmark = [pytest.mark.s3]


@pytest.fixture(params=on("moto", "real"))
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    yield from wired(request, request.param, elements=1 << 18)


@pytest.mark.ci
@pytest.mark.parametrize("rate", [0.2, pytest.param(0.05, marks=pytest.mark.slow)])
def test_flipped_bits_are_never_loaded(wire: Wire, rate: float) -> None:
    wire.proxy.rates = {"flipped": rate}
    outcomes = list[BaseException | None]()
    for seed in range(3):
        assert wire.save(seed) is None  # its own reads must not mislead it
        for _ in range(5):
            try:
                assert wire.load() == seed
                outcomes.append(None)
            except (dcp.CheckpointException, errors.CheckpointError) as error:
                outcomes.append(cause_of(error))
    wire.proxy.rates = {}
    assert wire.load(direct=True) == 2
    assert wire.proxy.counts["flipped"] > 0 and None in outcomes
    raised = [outcome for outcome in outcomes if not (outcome is None or isinstance(outcome, errors.CheckpointError))]
    assert all("`.metadata` fails its CRC" in str(error) for error in raised), raised  # in DCP's own words


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_flipped_is_read_again(wire: Wire, count: int) -> None:
    """Once the footer alone, which is read first, then blocks too."""
    assert wire.save(1) is None
    for number in range(count):
        wire.proxy.next("flipped", method="GET", path=".distcp", skip=number)
    assert wire.load() == 1
    assert wire.proxy.counts["flipped"] == count


@pytest.mark.slow
def test_a_silent_server_is_asked_again(wire: Wire) -> None:
    wire.proxy.next("silent", method="PUT", path=".distcp")
    wire.proxy.next("silent", method="GET", path=".metadata")
    began = time.monotonic()
    assert wire.save(1, deadline=9) is None
    assert wire.load(deadline=9) == 1
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
    assert wire.save(1) is None
    before = wire.filesystem(direct=True).read_all(".metadata", limit_nbytes=1 << 20)
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="PUT", path="/.metadata")
    wire.proxy.next("unavailable", method="PUT", path="/.metadata", times=1000)
    error = wire.save(2, deadline=5)
    assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert wire.filesystem(direct=True).read_all(".metadata", limit_nbytes=1 << 20) == before
    wire.proxy.land()
    assert wire.filesystem(direct=True).read_all(".metadata", limit_nbytes=1 << 20) != before
    assert wire.load(direct=True) == 2


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
        assert wire.save(1) is None
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="PUT", path="/.metadata")
    assert wire.save(2) is None
    assert wire.proxy.counts["late"] == 1
    assert wire.save(3, direct=True) is None
    wire.proxy.land()
    assert wire.load(direct=True) == 3


def test_who_came_second_may_have_less_metadata(wire: Wire) -> None:
    one, other = wire.filesystem(), wire.filesystem()
    for publisher, name in ((one, "one"), (other, "other")):
        publisher.publish(name, b"a file of its own")
    one.publish("metadata", b"x" * 1000, overwrite=False)
    with pytest.raises(errors.ConcurrentSaveError):
        other.publish("metadata", b"y", overwrite=False)


def test_credentials_that_may_neither_list_nor_look(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 403, not 404, to who asks for a missing object and may not list."""
    from botocore.exceptions import ClientError

    real = S3Bucket.send

    async def send(self: S3Bucket, operation: str, **parameters: Any) -> dict[str, Any]:
        if operation in ("head_object", "list_objects_v2", "list_multipart_uploads"):
            reply = {"Error": {"Code": "403"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
            raise PermissionError(13, "Forbidden") from ClientError(reply, operation)
        return await real(self, operation, **parameters)

    for number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(S3Bucket, "send", send)
            assert wire.save(number, direct=True) is None
        assert wire.load(direct=True) == number


def test_a_lost_conditional_reply(wire: Wire) -> None:
    """The retry is refused with 412, because the first attempt was done: ours is there, so it has won."""
    filesystem = wire.filesystem()
    filesystem.publish("mine", b"x")
    wire.proxy.next("lost", method="PUT", path="/.metadata")
    filesystem.publish(".metadata", b"ours", overwrite=False)
    assert wire.proxy.counts["lost"] == 1
    assert filesystem.read_all(".metadata", limit_nbytes=10) == b"ours"


@pytest.mark.parametrize("wire", on("moto"), indirect=True)
def test_a_server_that_ignores_conditions_is_found_out(wire: Wire) -> None:
    """On moto only: which checks no signatures, and so does not miss the header that the proxy takes away."""
    wire.proxy.swallowed = ("if-none-match",)
    with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
        assert wire.save(1, overwrite=False) is None
    filesystem = wire.filesystem()
    filesystem.publish("mine", b"x")
    with pytest.raises(errors.ConcurrentSaveError):
        filesystem.publish(".metadata", b"x", overwrite=False)
    assert wire.load() == 1


def test_a_server_that_refuses_conditions(wire: Wire) -> None:
    wire.proxy.refuses_conditions = True
    with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
        assert wire.save(1, overwrite=False) is None
    filesystem = wire.filesystem()
    for witness in ("none", "mine"):
        with pytest.raises(errors.ConcurrentSaveError):
            filesystem.publish(".metadata", b"x", overwrite=False)
        filesystem.publish(witness, b"x")
    with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
        filesystem.publish("new", b"x", overwrite=False)
    assert wire.load() == 1


def _save_and_load_dead(url: str, options: dict[str, Any]) -> float:
    began = time.monotonic()
    writer = NvcompWriter(url, storage_deadline_seconds=2, **options)
    reader = NvcompReader(url, storage_deadline_seconds=2, **options)
    for act in (
        lambda: dcp.save({"w": torch.ones(5)}, storage_writer=writer),
        lambda: dcp.load({"w": torch.ones(5)}, storage_reader=reader),
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
    url, count = "s3://restarts/run", 3 << 20
    save(url, {"w": torch.ones(count)}, **options)
    pid_file = directory / "run" / "client.rgw.pid"

    def save_often() -> None:
        parts: dict[str, Any] = {"codec": "none", "default_block_size": PART_NBYTES}
        writer = NvcompWriter(url, storage_deadline_seconds=120, **options, **parts)
        for seed in range(2, 12):
            dcp.save({"w": torch.full((count,), float(seed))}, storage_writer=writer, no_dist=True)

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
    assert_loads(url, {"w": torch.full((count,), 11.0)}, **options)
