"""Faults between us and object stores: a save ends complete or invisible, a load bit-exact or with an error.

What is S3's alone is in test_s3_faults.py. The emulators show what our requests and their answers come to, not how the
real services fail (storage/test_gcs.py).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_nvcomp import errors
from dcp_nvcomp.storage.open import open_filesystem

from .object_stores import AZURE, PART_NBYTES, Wire, on, wired

BOTH = pytest.mark.parametrize("wire", on("azure", "gcs"), indirect=True)
ONLY_GCS = pytest.mark.parametrize("wire", on("gcs"), indirect=True)


@pytest.fixture(params=on("moto", "real", "azure", "gcs"))
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    yield from wired(request, request.param)


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
    assert wire.save(1) is None
    wire.proxy.rates = rates
    for seed in (2, 3):
        assert wire.save(seed) is None
        for _ in range(3):
            assert wire.load() == seed
    wire.proxy.rates = {}
    assert wire.found() == 3
    assert all(wire.proxy.counts[fault] for fault in rates), wire.proxy.counts


@pytest.mark.ci
@ONLY_GCS
@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("fault", ["lost", "reset", "unavailable", "broken"])
def test_a_part_without_an_answer_goes_on_where_the_server_has_it(wire: Wire, fault: str, skip: int) -> None:
    """Also the last part, whose answer tells that the object is there."""
    target = wire.proxy.next(fault, **wire.requests.part, skip=skip)
    assert wire.save(2) is None
    assert target.left == 0
    assert wire.found() == 2


SMALL, LARGE = 1 << 18, 3 << 20  # elements: one request, and several parts
LOST = {
    ("moto", "real"): [
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
    ("wire", "method", "path", "elements", "overwrite"),
    [one for names, cases in LOST.items() for case in cases for one in on(*names, more=case)],
    indirect=["wire"],
)
def test_a_request_whose_answer_is_lost_was_done_once(
    wire: Wire, method: str, path: str, elements: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy server may take longer to list uploads than a save waits for leftovers, which are then warned of
    monkeypatch.setattr("dcp_nvcomp.storage.attempts._REMOVAL_SECONDS", 30.0)
    wire.elements = elements
    if overwrite:
        assert wire.save(1) is None
    wire.proxy.next("lost", method=method, path=path)
    assert wire.save(2, overwrite=overwrite) is None
    assert wire.proxy.counts["lost"] == 1
    assert wire.found() == 2


@pytest.mark.ci
@pytest.mark.parametrize("wire", on("moto", "real", "gcs"), indirect=True)
def test_an_upload_that_is_gone_but_complete(wire: Wire) -> None:
    """Done, its answer lost, and forgotten since: as AWS answers; Ceph and moto say again that all is well."""
    filesystem, data = wire.filesystem(), bytes(range(256)) * (3 * PART_NBYTES // 256)
    stream = filesystem.open_output("a")
    stream.write(data)
    wire.proxy.next("lost", **wire.requests.complete)
    wire.proxy.next("gone", **wire.requests.complete, skip=1)
    stream.close()
    assert wire.proxy.counts["lost"] == wire.proxy.counts["gone"] == 1
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data and filesystem.list_uploads() == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("wire", "skip", "at"),
    [*on("moto", "real", more=(0, "close")), *on("gcs", more=(0, "write")), *on("gcs", more=(2, "close"))],
    indirect=["wire"],
)
def test_an_upload_that_is_gone_fails_and_leaves_nothing(wire: Wire, skip: int, at: str) -> None:
    filesystem = wire.filesystem()
    stream = filesystem.open_output("a")
    gone = wire.proxy.next("gone", **wire.requests.complete, times=1 << 30, skip=skip)

    def use() -> None:
        stream.write(bytes(2 * PART_NBYTES + 5))
        assert at == "close"
        stream.close()

    with pytest.raises(errors.StorageError, match="404|made by the fault proxy"):
        use()
    gone.end()
    stream.abort()
    assert filesystem.list_names() == [] and filesystem.list_uploads() == []


@BOTH
@pytest.mark.ci
@pytest.mark.parametrize("fault", ["unavailable", "silent", "reset"])
@pytest.mark.parametrize("at", ["part", "publish"])
def test_an_outage_ends_in_time_and_the_writer_saves_again(wire: Wire, fault: str, at: str) -> None:
    request = wire.requests.part if at == "part" else wire.requests.publish
    writer = wire.writer(deadline=6)
    assert wire.save(1, writer) is None
    outage = wire.proxy.next(fault, **request, times=1 << 30)
    start = time.monotonic()
    error = wire.save(2, writer)
    assert error is not None and time.monotonic() - start < 25  # of several operations
    assert wire.load(direct=True) == 1
    outage.end()
    assert wire.save(3, writer) is None
    assert wire.load(direct=True) == 3


@BOTH
@pytest.mark.ci
def test_a_frozen_server_is_told_within_the_deadline(wire: Wire) -> None:
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
    assert time.monotonic() - start < (5 if wire.requests is AZURE else 15)  # an upload to Google is cancelled, too


@BOTH
@pytest.mark.ci
def test_what_lands_late_does_not_undo_what_another_save_published(wire: Wire) -> None:
    assert wire.save(1) is None
    wire.proxy.late_seconds = None
    wire.proxy.next("late", **wire.requests.publish)
    wire.proxy.next("unavailable", **wire.requests.publish, times=1 << 30)
    error = wire.save(2, deadline=4)
    assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert wire.save(3, direct=True) is None
    wire.proxy.land()
    assert wire.load(direct=True) == 3


@ONLY_GCS
def test_a_last_part_that_lands_after_the_abort_makes_no_object(wire: Wire) -> None:
    filesystem = open_filesystem(wire.url, storage_options=wire.options, deadline_seconds=3)
    stream = filesystem.open_output("a")
    stream.write(bytes(2 * PART_NBYTES))
    wire.proxy.late_seconds = None
    wire.proxy.next("late", **wire.requests.part)
    outage = wire.proxy.next("unavailable", **wire.requests.part, times=1 << 30)
    with pytest.raises(errors.StorageError):
        stream.close()
    outage.end()
    stream.abort()
    wire.proxy.land()
    assert filesystem.list_names() == []


@BOTH
@pytest.mark.ci
def test_who_publishes_too_often_waits(wire: Wire) -> None:
    """It was certainly not done: another save's checkpoint may come in between, and nothing has to be kept."""
    assert wire.save(1) is None
    wire.proxy.next("busy", **wire.requests.publish, times=3)
    assert wire.save(2) is None
    wire.proxy.next("busy", **wire.requests.publish, times=1 << 30)
    error = wire.save(3, deadline=6)
    assert isinstance(error, errors.StorageError) and "429" in str(error) and not error.outcome_unknown
    assert wire.found() == 2


@BOTH
def test_what_lands_late_before_it_is_sent_again_is_ours(wire: Wire) -> None:
    assert wire.save(1) is None
    lost = wire.proxy.next("lost", **wire.requests.publish)
    look = wire.proxy.next("unavailable", method="GET", path=wire.requests.look, times=2)
    assert wire.save(2) is None
    assert lost.left == look.left == 0
    assert wire.load(direct=True) == 2


@BOTH
def test_each_refusal_is_told_at_once(wire: Wire) -> None:
    gone = wire.proxy.next("gone", **wire.requests.publish, times=1 << 30)
    start = time.monotonic()
    error = wire.save(1, deadline=60)
    assert time.monotonic() - start < 10
    assert isinstance(error, errors.StorageError) and error.errno == errno.ENOENT and not error.outcome_unknown
    gone.end()
    assert wire.save(2) is None
