"""Faults between us and Azure or Google Cloud Storage: a save ends complete or invisible, a load bit-exact or fails.

The emulators show what our requests and their answers come to, not how the real services fail (storage/test_gcs.py).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter, errors
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import load
from tests.states import State, assert_same

from .proxy import FaultProxy

PART_NBYTES = 5 << 20


@dataclass(frozen=True)
class Requests:
    """How a store's requests look on the wire: method, and what is in the address."""

    part: tuple[str, str]
    publish: tuple[str, str]
    look: str  # in the address of a GET of what was published
    once: tuple[tuple[str, str], ...]  # of a save, each of which may lose its answer


AZURE = Requests(
    part=("PUT", "comp=block"),
    publish=("PUT", "/.metadata"),
    look="/.metadata",
    once=(("PUT", ".metadata"), ("PUT", "comp=blocklist"), ("PUT", "comp=block&")),
)
GCS = Requests(
    part=("PUT", "upload_id="),
    publish=("POST", "ifGenerationMatch"),
    look=".metadata?alt=media",
    once=(("POST", "uploadType=resumable"), ("POST", "ifGenerationMatch"), ("POST", "uploadType=multipart")),
)


class Wire:
    """A fresh directory on a server, and the proxy before it."""

    def __init__(self, url: str, direct: dict[str, Any], options: dict[str, Any], proxy: FaultProxy) -> None:
        self.url, self.direct, self.proxy = url, direct, proxy
        self.options = {**options, "default_block_size": PART_NBYTES}

    def writer(self, *, deadline: float = 30, direct: bool = False) -> NvcompWriter:
        options = self.direct if direct else self.options
        return NvcompWriter(self.url, thread_count=1, codec="none", storage_deadline_seconds=deadline, **options)

    def load(self, *, direct: bool = True) -> int:
        """Load, make sure that all is of one save, and return its seed."""
        options = self.direct if direct else self.options
        found = load(self.url, state_of(-1), **options)
        assert_same(found, state_of(int(found["seed"])))
        return int(found["seed"])

    def names(self) -> list[str]:
        return open_filesystem(self.url, storage_options=self.direct).list_names()


@pytest.fixture
def azure(azure_store: tuple[str, dict[str, Any]]) -> Iterator[Wire]:
    url, direct = azure_store
    fields = dict(field.split("=", 1) for field in filter(None, direct["connection_string"].split(";")))
    with FaultProxy(fields["BlobEndpoint"].rpartition("/")[0], seed=4) as proxy:
        options = {"account_name": "ckpt", "account_key": fields["AccountKey"], "endpoint": f"{proxy.url}/ckpt"}
        yield Wire(url, direct, options, proxy)


@pytest.fixture
def gcs(gcs_store: tuple[str, dict[str, Any]]) -> Iterator[Wire]:
    url, direct = gcs_store
    with FaultProxy(direct["endpoint_url"], seed=4) as proxy:
        yield Wire(url, direct, {**direct, "endpoint_url": proxy.url}, proxy)


@pytest.fixture
def wire(request: pytest.FixtureRequest, requests: Requests) -> Wire:
    wire: Wire = request.getfixturevalue("azure" if requests is AZURE else "gcs")
    return wire


def on_azure(*more: Any) -> Any:
    return pytest.param(AZURE, *more, marks=pytest.mark.azure)


def on_gcs(*more: Any) -> Any:
    return pytest.param(GCS, *more, marks=pytest.mark.gcs)


@pytest.fixture(params=[on_azure(), on_gcs()], ids=["azure", "gcs"])
def requests(request: pytest.FixtureRequest) -> Requests:
    found: Requests = request.param
    return found


def state_of(seed: int) -> State:
    """Return a tensor of several parts of an upload, filled with the seed."""
    return {"w": torch.full((3 << 20,), float(seed)), "small": torch.full((5,), seed), "seed": seed}


def save(writer: NvcompWriter, seed: int) -> errors.CheckpointError | None:
    """Save, and return the error of this package that it failed with."""
    try:
        dcp.save(state_of(seed), storage_writer=writer)
    except dcp.CheckpointException as error:
        cause = error.failures[0][0]
        assert isinstance(cause, errors.CheckpointError), cause
        return cause
    return None


@pytest.mark.ci
@pytest.mark.parametrize(
    "rates",
    [
        {"unavailable": 0.2},
        {"reset": 0.2, "lost": 0.2},
        {"truncated": 0.3, "shortened": 0.3},
        pytest.param({"broken": 0.2, "lost": 0.2, "unavailable": 0.2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bad_network_is_survived(wire: Wire, rates: dict[str, float]) -> None:
    assert save(wire.writer(), 1) is None
    wire.proxy.rates = rates
    for seed in (2, 3):
        assert save(wire.writer(), seed) is None
        for _ in range(2):
            assert wire.load(direct=False) == seed
    wire.proxy.rates = {}
    assert len(wire.names()) == 3 and wire.load() == 3
    assert sum(wire.proxy.counts[fault] for fault in rates) > 0, wire.proxy.counts


@pytest.mark.ci
@pytest.mark.parametrize("requests", [on_gcs()], ids=["gcs"])
@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("fault", ["lost", "reset", "unavailable", "broken"])
def test_a_part_without_an_answer_goes_on_where_the_server_has_it(wire: Wire, fault: str, skip: int) -> None:
    """Also the last part, whose answer tells that the object is there."""
    target = wire.proxy.next(fault, method="PUT", path=GCS.part[1], skip=skip)
    assert save(wire.writer(), 2) is None
    assert target.left == 0
    assert len(wire.names()) == 3 and wire.load() == 2


@pytest.mark.parametrize(
    ("requests", "method", "path"), [*(on_azure(*one) for one in AZURE.once), *(on_gcs(*one) for one in GCS.once)]
)
def test_a_request_whose_answer_is_lost_was_done_once(wire: Wire, method: str, path: str) -> None:
    assert save(wire.writer(), 1) is None
    target = wire.proxy.next("lost", method=method, path=path)
    assert save(wire.writer(), 2) is None
    assert target.left == 0
    assert len(wire.names()) == 3 and wire.load() == 2


@pytest.mark.parametrize("requests", [on_gcs()], ids=["gcs"])
def test_an_upload_that_is_gone_but_complete(wire: Wire) -> None:
    """The last part was taken, its answer lost, and the session forgotten since."""
    filesystem = open_filesystem(wire.url, storage_options=wire.options)
    data = bytes(range(256)) * (3 * PART_NBYTES // 256)
    stream = filesystem.open_output("a")
    stream.write(data)
    wire.proxy.next("lost", method="PUT", path=GCS.part[1])
    wire.proxy.next("gone", method="PUT", path=GCS.part[1], skip=1)
    stream.close()
    assert wire.proxy.counts["lost"] == wire.proxy.counts["gone"] == 1
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data


@pytest.mark.parametrize("requests", [on_gcs()], ids=["gcs"])
@pytest.mark.parametrize("at", ["write", "close"])
def test_an_upload_that_is_gone_fails_and_leaves_nothing(wire: Wire, at: str) -> None:
    filesystem = open_filesystem(wire.url, storage_options=wire.options)
    stream = filesystem.open_output("a")
    gone = wire.proxy.next("gone", method="PUT", path=GCS.part[1], times=1 << 30, skip=0 if at == "write" else 2)

    def use() -> None:
        stream.write(bytes(2 * PART_NBYTES + 5))
        assert at == "close"
        stream.close()

    with pytest.raises(errors.StorageError, match="404"):
        use()
    gone.end()
    stream.abort()
    assert wire.names() == []


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["unavailable", "silent", "reset"])
@pytest.mark.parametrize("at", ["part", "publish"])
def test_an_outage_ends_in_time_and_the_writer_saves_again(wire: Wire, requests: Requests, fault: str, at: str) -> None:
    method, path = requests.part if at == "part" else requests.publish
    writer = wire.writer(deadline=6)
    assert save(writer, 1) is None
    outage = wire.proxy.next(fault, method=method, path=path, times=1 << 30)
    start = time.monotonic()
    error = save(writer, 2)
    assert error is not None and time.monotonic() - start < 25  # of several operations
    assert wire.load() == 1
    outage.end()
    assert save(writer, 3) is None
    assert wire.load() == 3


@pytest.mark.ci
def test_a_frozen_server_is_told_within_the_deadline(wire: Wire, requests: Requests) -> None:
    """A look at what went wrong does not begin another deadline, nor does the removal of what is left."""
    deadline = 18.0
    filesystem = open_filesystem(wire.url, storage_options=wire.options, deadline_seconds=deadline)
    stream = filesystem.open_output("large")
    stream.write(bytes(2 * PART_NBYTES))
    for method, path in (("PUT", "comp=blocklist"), ("PUT", "upload_id="), ("DELETE", "upload_id=")):
        wire.proxy.next("silent", method=method, path=path, times=1 << 30)
    for method in ("GET", "HEAD", "POST"):
        wire.proxy.next("silent", method=method, times=1 << 30)

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
    assert time.monotonic() - start < (5 if requests is AZURE else 15)  # an upload to Google is cancelled, too


@pytest.mark.ci
def test_what_lands_late_does_not_undo_what_another_save_published(wire: Wire, requests: Requests) -> None:
    assert save(wire.writer(), 1) is None
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method=requests.publish[0], path=requests.publish[1])
    wire.proxy.next("unavailable", method=requests.publish[0], path=requests.publish[1], times=1 << 30)
    error = save(wire.writer(deadline=4), 2)
    assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert save(wire.writer(direct=True), 3) is None
    wire.proxy.land()
    assert wire.load() == 3


@pytest.mark.parametrize("requests", [on_gcs()], ids=["gcs"])
def test_a_last_part_that_lands_after_the_abort_makes_no_object(wire: Wire) -> None:
    filesystem = open_filesystem(wire.url, storage_options=wire.options, deadline_seconds=3)
    stream = filesystem.open_output("a")
    stream.write(bytes(2 * PART_NBYTES))
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="PUT", path=GCS.part[1])
    outage = wire.proxy.next("unavailable", method="PUT", path=GCS.part[1], times=1 << 30)
    with pytest.raises(errors.StorageError):
        stream.close()
    outage.end()
    stream.abort()
    wire.proxy.land()
    assert wire.names() == []


@pytest.mark.ci
def test_who_publishes_too_often_waits(wire: Wire, requests: Requests) -> None:
    """It was certainly not done: another save's checkpoint may come in between, and nothing has to be kept."""
    assert save(wire.writer(), 1) is None
    wire.proxy.next("busy", method=requests.publish[0], path=requests.publish[1], times=3)
    assert save(wire.writer(), 2) is None
    wire.proxy.next("busy", method=requests.publish[0], path=requests.publish[1], times=1 << 30)
    error = save(wire.writer(deadline=6), 3)
    assert isinstance(error, errors.StorageError) and "429" in str(error) and not error.outcome_unknown
    assert wire.load() == 2 and len(wire.names()) == 3


def test_what_lands_late_before_it_is_sent_again_is_ours(wire: Wire, requests: Requests) -> None:
    assert save(wire.writer(), 1) is None
    lost = wire.proxy.next("lost", method=requests.publish[0], path=requests.publish[1])
    look = wire.proxy.next("unavailable", method="GET", path=requests.look, times=2)
    assert save(wire.writer(), 2) is None
    assert lost.left == look.left == 0
    assert wire.load() == 2


def test_each_refusal_is_told_at_once(wire: Wire, requests: Requests) -> None:
    gone = wire.proxy.next("gone", method=requests.publish[0], path=requests.publish[1], times=1 << 30)
    start = time.monotonic()
    error = save(wire.writer(deadline=60), 1)
    assert time.monotonic() - start < 10
    assert isinstance(error, errors.StorageError) and error.errno == errno.ENOENT and not error.outcome_unknown
    gone.end()
    assert save(wire.writer(), 2) is None
