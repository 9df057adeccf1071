"""Faults between us and object stores: a save ends complete or invisible, a load bit-exact or with an error.

The emulators show what our requests and their answers come to, not how the real services fail.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import pickle
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec.asyn
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.storage.attempts import Attempts
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.objects.s3 import S3Bucket
from tests.conftest import KindNamed
from tests.distributed.launch import RankPool, ranks
from tests.stores.kinds import Reachable, parameters
from tests.stores.places import PART_NBYTES, Place

from .proxy import FaultProxy, Target

__all__ = ["ranks"]

SMALL, LARGE = 1 << 20, 12 << 20  # bytes: one request, and several parts
FOREVER = 1 << 30


@dataclass(frozen=True)
class Requests:
    """How requests look on the wire: a method, and what is in the address."""

    part: tuple[str, str]
    publish: tuple[str, str]
    complete: tuple[str, str]
    look: str  # in the address of a GET of what was published


_PUT = ("PUT", "/.metadata")
_PART = ("PUT", "upload_id=")  # to Google Cloud, of which the last one completes the upload
_ON_S3 = Requests(("PUT", "partNumber="), _PUT, ("POST", "uploadId="), "/.metadata")
REQUESTS = {
    "moto": _ON_S3,
    "ceph": _ON_S3,
    "azure": Requests(("PUT", "comp=block"), _PUT, ("PUT", "comp=blocklist"), "/.metadata"),
    "gcs": Requests(_PART, ("POST", "ifGenerationMatch"), _PART, ".metadata?alt=media"),
}


@dataclass(frozen=True)
class Wire:
    """A fresh place on a server, the same through a proxy, and the proxy."""

    proxy: FaultProxy
    direct: Place
    place: Place  # through the proxy
    requests: Requests

    def next(self, fault: str, request: tuple[str, str], **options: Any) -> Target:
        return self.proxy.next(fault, method=request[0], path=request[1], **options)

    def found(self) -> int:
        """Load without the proxy, and make sure that nothing is there but what was loaded."""
        assert len(self.direct.names()) == 3 and self.direct.left() == set()
        return self.direct.loaded()

    def filesystem(self, deadline_seconds: float = 30) -> Filesystem:
        return self.place.within(deadline_seconds).filesystem()


@pytest.fixture(params=parameters("moto", "ceph", "azure", "gcs"))
def wire(
    request: pytest.FixtureRequest, kind_named: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Wire]:
    """A store by its name; tests wait for what is retried, not for the pauses between."""
    monkeypatch.setattr(Attempts, "_first_pause_seconds", 0.01)
    kind: Reachable = kind_named(request.param)
    url, options = kind.place()
    with FaultProxy(f"http://127.0.0.1:{kind.port}", seed=4) as proxy:
        place = Place(*kind.through((url, options), proxy.port), deadline_seconds=30).with_nbytes(LARGE)
        yield Wire(proxy, Place(url, options, LARGE), place, REQUESTS[request.param])
    kind.remove(url)


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("wire", parameters(*names), indirect=True)


BOTH, GCS, ON_S3 = on("azure", "gcs"), on("gcs"), on("moto", "ceph")


# --- a bad network ----------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
    "rates",
    [
        {"unavailable": 0.2},
        pytest.param({"unavailable": 0.4}, marks=pytest.mark.slow),
        {"reset": 0.2, "lost": 0.2},
        {"truncated": 0.3, "shortened": 0.3},
        pytest.param({"broken": 0.2, "lost": 0.2, "unavailable": 0.2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bad_network_is_survived(wire: Wire, rates: dict[str, float]) -> None:
    assert wire.place.save(1) is None
    wire.proxy.rates = rates
    for number in (2, 3):
        assert wire.place.save(number) is None
        for _ in range(3):
            assert wire.place.loaded() == number
    wire.proxy.rates = {}
    assert wire.found() == 3
    assert all(wire.proxy.counts[fault] for fault in rates), wire.proxy.counts


@pytest.mark.ci
@ON_S3
@pytest.mark.parametrize("rate", [0.2, pytest.param(0.05, marks=pytest.mark.slow)])
def test_flipped_bits_are_never_loaded(wire: Wire, rate: float) -> None:
    place = wire.place.with_nbytes(SMALL)
    wire.proxy.rates = {"flipped": rate}
    outcomes = list[BaseException | None]()
    for number in range(3):
        assert place.save(number) is None  # its own reads must not mislead it
        for _ in range(5):
            try:
                assert place.loaded() == number
                outcomes.append(None)
            except dcp.CheckpointException as error:
                outcomes.append(error.failures[0][0])
            except errors.CheckpointError as error:
                outcomes.append(error)
    wire.proxy.rates = {}
    assert wire.direct.with_nbytes(SMALL).loaded() == 2
    assert wire.proxy.counts["flipped"] > 0 and None in outcomes
    raised = [outcome for outcome in outcomes if not (outcome is None or isinstance(outcome, errors.CheckpointError))]
    assert all("`.metadata` fails its CRC" in str(error) for error in raised), raised  # in DCP's own words


@ON_S3
@pytest.mark.parametrize("count", [1, 2])
def test_what_was_flipped_is_read_again(wire: Wire, count: int) -> None:
    """Once the footer alone, which is read first, then blocks too."""
    assert wire.place.save(1) is None
    for number in range(count):
        wire.proxy.next("flipped", method="GET", path=".distcp", skip=number)
    assert wire.place.loaded() == 1
    assert wire.proxy.counts["flipped"] == count


@pytest.mark.ci
@GCS
@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("fault", ["lost", "reset", "unavailable", "broken"])
def test_a_part_without_an_answer_goes_on_where_the_server_has_it(wire: Wire, fault: str, skip: int) -> None:
    """Also the last part, whose answer says that the object is there."""
    target = wire.next(fault, wire.requests.part, skip=skip)
    assert wire.place.save(2) is None
    assert target.left == 0
    assert wire.found() == 2


# --- answers that are lost --------------------------------------------------------------------------------------------

LOST = {
    ("moto", "ceph"): [
        ("PUT", ".distcp", SMALL, True),
        ("PUT", "/.metadata", SMALL, True),
        ("PUT", "/.metadata", SMALL, False),
        ("POST", "uploads", LARGE, True),
        ("PUT", "partNumber=2", LARGE, True),
        ("POST", "uploadId=", LARGE, True),
        ("DELETE", ".distcp", SMALL, True),
        ("HEAD", "/.metadata", SMALL, False),
    ],
    ("azure",): [
        ("PUT", ".metadata", LARGE, True),
        ("PUT", "comp=blocklist", LARGE, True),
        ("PUT", "comp=block&", LARGE, True),
    ],
    ("gcs",): [
        ("POST", "uploadType=resumable", LARGE, True),
        ("POST", "ifGenerationMatch", LARGE, True),
        ("POST", "uploadType=multipart", LARGE, True),
    ],
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("wire", "method", "path", "nbytes", "overwrite"),
    [
        pytest.param(*one.values, *case, marks=one.marks, id="-".join(map(str, (one.id, *case))))
        for names, cases in LOST.items()
        for case in cases
        for one in parameters(*names)
    ],
    indirect=["wire"],
)
def test_a_request_whose_answer_is_lost_was_done_once(
    wire: Wire, method: str, path: str, nbytes: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy server may take longer to list uploads than a save waits for leftovers, which are then warned of
    monkeypatch.setattr("dcp_nvcomp.storage.attempts._REMOVAL_SECONDS", 30.0)
    place = wire.place.with_nbytes(nbytes)
    if overwrite:
        assert place.save(1) is None
    wire.proxy.next("lost", method=method, path=path)
    assert place.save(2, place.writer(overwrite=overwrite)) is None
    assert wire.proxy.counts["lost"] == 1
    assert len(wire.direct.names()) == 3 and wire.direct.left() == set()
    assert wire.direct.with_nbytes(nbytes).loaded() == 2


@pytest.mark.ci
@on("moto", "ceph", "gcs")
def test_an_upload_that_is_gone_but_complete(wire: Wire) -> None:
    """Done, its answer lost, and forgotten since: as AWS answers; Ceph and moto say again that all is well."""
    filesystem, data = wire.filesystem(), bytes(range(256)) * (3 * PART_NBYTES // 256)
    stream = filesystem.open_output("a")
    stream.write(data)
    wire.next("lost", wire.requests.complete)
    wire.next("gone", wire.requests.complete, skip=1)
    stream.close()
    assert wire.proxy.counts["lost"] == wire.proxy.counts["gone"] == 1
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data and filesystem.list_uploads() == []


@ON_S3
def test_a_replacement_that_is_gone_is_not_taken_for_what_was_there(wire: Wire) -> None:
    """Which may have the same size and as many parts; another writer that starts anew aborts all uploads."""
    filesystem = wire.filesystem()
    old, new = bytes(3 * PART_NBYTES), bytes(range(256)) * (3 * PART_NBYTES // 256)

    def replace(data: bytes) -> None:
        stream = filesystem.open_replacement("a")
        stream.write(data)
        stream.close()

    replace(old)
    gone = wire.next("gone", wire.requests.complete, times=FOREVER)
    with pytest.raises(errors.StorageError, match="404|made by the fault proxy"):
        replace(new)
    gone.end()
    assert filesystem.read_all("a", limit_nbytes=len(old)) == old
    wire.next("lost", wire.requests.complete)
    wire.next("gone", wire.requests.complete, skip=1)
    replace(new)
    assert filesystem.read_all("a", limit_nbytes=len(new)) == new


@pytest.mark.ci
@on("moto", "ceph", "gcs")
@pytest.mark.parametrize("skip", [0, 2])
def test_an_upload_that_is_gone_fails_and_leaves_nothing(wire: Wire, skip: int) -> None:
    """While it is written, to Google, or when it is closed."""
    filesystem = wire.filesystem()
    stream = filesystem.open_output("a")
    gone = wire.next(
        "gone", wire.requests.complete, times=FOREVER, skip=skip if wire.requests is REQUESTS["gcs"] else 0
    )
    with pytest.raises(errors.StorageError, match="404|made by the fault proxy"):  # noqa: PT012
        stream.write(bytes(2 * PART_NBYTES + 5))
        stream.close()
    gone.end()
    stream.abort()
    assert filesystem.list_names() == [] and filesystem.list_uploads() == []


@ON_S3
def test_a_lost_conditional_reply(wire: Wire) -> None:
    """The retry is refused with 412, because the first attempt was done: ours is there, so it has won."""
    filesystem = wire.filesystem()
    filesystem.publish("mine", b"x")
    wire.next("lost", wire.requests.publish)
    filesystem.publish(".metadata", b"ours", overwrite=False)
    assert wire.proxy.counts["lost"] == 1
    assert filesystem.read_all(".metadata", limit_nbytes=10) == b"ours"


# --- a server that is dead, silent or refuses -------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("at", ["part", "publish"])
def test_an_outage_ends_in_time_and_the_writer_saves_again(wire: Wire, at: str) -> None:
    """Of answers; servers that are dead or silent are in tests/stores/test_server_killed.py."""
    request = wire.requests.part if at == "part" else wire.requests.publish
    writer = wire.place.within(6).writer()
    assert wire.place.save(1, writer) is None
    outage = wire.next("unavailable", request, times=FOREVER)
    start = time.monotonic()
    error = wire.place.save(2, writer)
    assert error is not None and time.monotonic() - start < 25  # of several operations
    assert wire.direct.loaded() == 1
    outage.end()
    assert wire.place.save(3, writer) is None
    assert wire.direct.loaded() == 3


@pytest.mark.ci
@ON_S3
def test_an_outage_ends_with_the_attempts_and_the_seconds(wire: Wire) -> None:
    wire.proxy.rates = {"unavailable": 1}
    filesystem = wire.filesystem(1.5)
    stream = filesystem.open_output("a")
    stream.write(b"x")
    with pytest.raises(errors.StorageError, match=r"Could not write: .*, after \d+ attempts in \d+ s") as caught:
        stream.close()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.attempts, again.outcome_unknown, str(again)) == (caught.value.attempts, True, str(caught.value))
    assert again.attempts == wire.proxy.counts["unavailable"] >= 3
    assert again.path == f"{wire.place.url}/a"
    stream.abort()


@pytest.mark.ci
@BOTH
def test_a_frozen_server_is_reported_within_the_deadline(wire: Wire) -> None:
    """A look at what went wrong does not begin another deadline, nor does the removal of what is left."""
    deadline = 18.0
    filesystem = wire.filesystem(deadline)
    stream = filesystem.open_output("large")
    stream.write(bytes(2 * PART_NBYTES))
    for method, path in (("PUT", "comp=blocklist"), ("PUT", "upload_id="), ("DELETE", "upload_id=")):
        wire.proxy.next("silent", method=method, path=path, times=FOREVER)
    for method in ("GET", "HEAD", "POST"):
        wire.proxy.next("silent", method=method, times=FOREVER)

    def failing(words: str, use: Callable[[], Any]) -> float:
        start = time.monotonic()
        with pytest.raises(errors.StorageError, match=words) as caught:
            use()
        assert caught.value.errno == errno.ETIMEDOUT
        return time.monotonic() - start

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(failing, "Could not read", lambda: filesystem.read("a", 0, 5))
        completing = pool.submit(failing, "Could not complete", stream.close)
        assert reading.result() < deadline + 3 and completing.result() < deadline + 3
    start = time.monotonic()
    stream.abort()
    assert time.monotonic() - start < 15  # an upload to Google is cancelled, too


@pytest.mark.slow
@ON_S3
def test_a_silent_server_is_asked_again(wire: Wire) -> None:
    place = wire.place.with_nbytes(SMALL).within(9)
    wire.proxy.next("silent", method="PUT", path=".distcp")
    wire.proxy.next("silent", method="GET", path=".metadata")
    began = time.monotonic()
    assert place.save(1) is None and place.loaded() == 1
    assert wire.proxy.counts["silent"] == 2
    assert time.monotonic() - began > 5  # a third of the deadline each


@pytest.mark.ci
@ON_S3
def test_no_request_outlives_its_deadline(wire: Wire) -> None:
    wire.proxy.rates = {"silent": 1}
    filesystem = wire.filesystem(0.6)
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        for number in range(8):
            pool.submit(pytest.raises, errors.StorageError, filesystem.read, f"file-{number}", 0, 1)
        pool.shutdown()
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert not [task for task in asyncio.all_tasks(fsspec.asyn.get_loop()) if "_perform" in repr(task)]


@BOTH
def test_each_refusal_is_reported_at_once(wire: Wire) -> None:
    gone = wire.next("gone", wire.requests.publish, times=FOREVER)
    start = time.monotonic()
    error = wire.place.within(60).save(1)
    assert time.monotonic() - start < 20
    assert isinstance(error, errors.StorageError) and error.errno == errno.ENOENT and not error.outcome_unknown
    gone.end()
    assert wire.place.save(2) is None


@pytest.mark.ci
@ON_S3
def test_a_refusal_is_not_retried(wire: Wire) -> None:
    filesystem = wire.filesystem()
    before = wire.proxy.counts["requests"]
    with pytest.raises(errors.StorageError) as caught:
        filesystem.read("missing", 0, 1)
    assert caught.value.errno == errno.ENOENT and caught.value.attempts == 1
    assert wire.proxy.counts["requests"] == before + 1
    assert not caught.value.outcome_unknown


@pytest.mark.ci
@BOTH
def test_publishing_too_often_waits(wire: Wire) -> None:
    """It was certainly not done: another save's checkpoint may come in between, and nothing has to be kept."""
    assert wire.place.save(1) is None
    wire.next("busy", wire.requests.publish, times=3)
    assert wire.place.save(2) is None
    wire.next("busy", wire.requests.publish, times=FOREVER)
    error = wire.place.within(6).save(3)
    assert isinstance(error, errors.StorageError) and "429" in str(error) and not error.outcome_unknown
    assert wire.found() == 2


# --- requests that land late ------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_what_lands_late_does_not_undo_what_another_save_published(wire: Wire) -> None:
    assert wire.place.save(1) is None
    wire.proxy.late_seconds = None
    wire.next("late", wire.requests.publish)
    wire.next("unavailable", wire.requests.publish, times=FOREVER)
    error = wire.place.within(4).save(2)
    assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert wire.direct.save(3) is None
    wire.proxy.land()
    assert wire.direct.loaded() == 3


@ON_S3
@pytest.mark.parametrize("fresh", [True, False])
def test_a_late_publish_does_not_land_over_another(wire: Wire, fresh: bool) -> None:
    """An attempt that nothing answered and that is done much later, when its save is over and replaced by another."""
    if not fresh:
        assert wire.place.save(1) is None
    wire.proxy.late_seconds = None
    wire.next("late", wire.requests.publish)
    assert wire.place.save(2) is None
    assert wire.proxy.counts["late"] == 1
    assert wire.direct.save(3) is None
    wire.proxy.land()
    assert wire.direct.loaded() == 3


@pytest.mark.ci
@ON_S3
def test_what_lands_after_the_deadline_is_whole(wire: Wire) -> None:
    """A publish that was never answered may be done later: its files must still be there then."""
    assert wire.place.save(1) is None
    wire.proxy.late_seconds = None
    wire.next("late", wire.requests.publish)
    wire.next("unavailable", wire.requests.publish, times=FOREVER)
    error = wire.place.within(5).save(2)
    assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert wire.direct.loaded() == 1
    wire.proxy.land()
    assert wire.direct.loaded() == 2


@BOTH
def test_what_lands_late_before_it_is_sent_again_is_ours(wire: Wire) -> None:
    assert wire.place.save(1) is None
    lost = wire.next("lost", wire.requests.publish)
    look = wire.proxy.next("unavailable", method="GET", path=wire.requests.look, times=2)
    assert wire.place.save(2) is None
    assert lost.left == look.left == 0
    assert wire.direct.loaded() == 2


@GCS
def test_a_last_part_that_lands_after_the_abort_makes_no_object(wire: Wire) -> None:
    filesystem = wire.filesystem(3)
    stream = filesystem.open_output("a")
    stream.write(bytes(2 * PART_NBYTES))
    wire.proxy.late_seconds = None
    wire.next("late", wire.requests.part)
    outage = wire.next("unavailable", wire.requests.part, times=FOREVER)
    with pytest.raises(errors.StorageError):
        stream.close()
    outage.end()
    stream.abort()
    wire.proxy.land()
    assert filesystem.list_names() == []


# --- conditions and rights of S3 --------------------------------------------------------------------------------------


@ON_S3
@pytest.mark.parametrize("refuses", [False, True], ids=["conditions", "no conditions"])
def test_an_attempt_is_not_repeated_over_another_save(wire: Wire, refuses: bool) -> None:
    """Its first attempt arrived, another save replaced that and removed its files: it must not come back."""
    wire.proxy.refuses_conditions = refuses
    ours, other = wire.filesystem(), wire.direct.filesystem()
    other.publish(".metadata", b"an old one")
    wire.next("lost", wire.requests.publish, times=2)  # aiohttp sends some a second time by itself
    # from the second attempt's first request on, until the other save has published
    outage = wire.proxy.next("unavailable", method="HEAD", path="/.metadata", times=FOREVER, skip=1)

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


@ON_S3
@pytest.mark.parametrize("how", ["ignored", "refused"])
def test_a_server_that_ignores_conditions_is_found_out(wire: Wire, how: str, request: pytest.FixtureRequest) -> None:
    """Or refuses them: then what is there is looked up before."""
    if how == "ignored":
        if "ceph" in request.node.name:
            return  # it misses the header, which is signed
        wire.proxy.swallowed = ("if-none-match",)
    else:
        wire.proxy.refuses_conditions = True
    with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
        assert wire.place.save(1, wire.place.writer(overwrite=False)) is None
    filesystem = wire.filesystem()
    for witness in ("none", "mine"):
        if how == "refused" or witness == "mine":
            with pytest.raises(errors.ConcurrentSaveError):
                filesystem.publish(".metadata", b"x", overwrite=False)
        filesystem.publish(witness, b"x")
    if how == "refused":
        with pytest.warns(RuntimeWarning, match="does not know If-None-Match"):
            filesystem.publish("new", b"x", overwrite=False)
    assert wire.place.loaded() == 1


@ON_S3
def test_credentials_that_may_neither_list_nor_look(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 403, not 404, to a client that asks for a missing object and may not list."""
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
            assert wire.direct.save(number) is None
        assert wire.direct.loaded() == number


# --- servers of their own ---------------------------------------------------------------------------------------------


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
            assert isinstance(cause, errors.StorageError), caught.value
            assert re.search(r"after \d+ attempts in \d+ s", str(cause)), cause
        total = torch.tensor([1])
        dist.all_reduce(total)
        assert int(total) == 2
    return time.monotonic() - began


@pytest.mark.s3
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


@pytest.mark.s3
@pytest.mark.slow
def test_a_server_killed_and_restarted_during_a_save(kind_named: KindNamed) -> None:
    server = kind_named("own_ceph")
    place = Place(*server.place(), deadline_seconds=120).with_nbytes(LARGE)
    assert place.save(1) is None

    def save_often() -> None:
        writer = place.writer()
        for number in range(2, 12):
            assert place.save(number, writer) is None

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_often)
        for _ in range(2):
            time.sleep(1)
            server.kill()
            time.sleep(3)
            server.start()
        assert not saving.done(), "the save was over before the server was killed"
        saving.result(200)
    assert place.loaded() == 11
