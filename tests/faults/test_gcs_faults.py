"""Faults between us and Google Cloud Storage: a save ends complete or invisible, a load bit-exact or with an error.

The emulator shows what our requests and its answers come to, not how the real service fails (storage/test_gcs.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter, errors
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import load
from tests.states import State, assert_same

from .proxy import FaultProxy

pytestmark = pytest.mark.gcs

PART_NBYTES = 5 << 20
BEGIN = "uploadType=resumable"
PART = "upload_id="
PUBLISH = "ifGenerationMatch"


class Wire:
    """A fresh directory on a server, and the proxy before it."""

    def __init__(self, store: tuple[str, dict[str, Any]], proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.url, self.direct = store
        self.options = {**self.direct, "endpoint_url": proxy.url, "default_block_size": PART_NBYTES}

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
def wire(gcs_store: tuple[str, dict[str, Any]]) -> Iterator[Wire]:
    with FaultProxy(gcs_store[1]["endpoint_url"], seed=4) as proxy:
        yield Wire(gcs_store, proxy)


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


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("fault", ["lost", "reset", "unavailable", "broken"])
def test_a_part_without_an_answer_goes_on_where_the_server_has_it(wire: Wire, fault: str, skip: int) -> None:
    """Also the last part, whose answer tells that the object is there."""
    target = wire.proxy.next(fault, method="PUT", path=PART, skip=skip)
    assert save(wire.writer(), 2) is None
    assert target.left == 0
    assert len(wire.names()) == 3 and wire.load() == 2


@pytest.mark.parametrize(("method", "path"), [("POST", BEGIN), ("POST", PUBLISH), ("POST", "uploadType=multipart")])
def test_a_request_whose_answer_is_lost_was_done_once(wire: Wire, method: str, path: str) -> None:
    assert save(wire.writer(), 1) is None
    target = wire.proxy.next("lost", method=method, path=path)
    assert save(wire.writer(), 2) is None
    assert target.left == 0
    assert len(wire.names()) == 3 and wire.load() == 2


def test_an_upload_that_is_gone_but_complete(wire: Wire) -> None:
    """The last part was taken, its answer lost, and the session forgotten since."""
    filesystem = open_filesystem(wire.url, storage_options=wire.options)
    data = bytes(range(256)) * (3 * PART_NBYTES // 256)
    stream = filesystem.open_output("a")
    stream.write(data)
    wire.proxy.next("lost", method="PUT", path=PART)
    wire.proxy.next("gone", method="PUT", path=PART, skip=1)
    stream.close()
    assert wire.proxy.counts["lost"] == wire.proxy.counts["gone"] == 1
    assert filesystem.read_all("a", limit_nbytes=len(data)) == data


@pytest.mark.parametrize("at", ["write", "close"])
def test_an_upload_that_is_gone_fails_and_leaves_nothing(wire: Wire, at: str) -> None:
    filesystem = open_filesystem(wire.url, storage_options=wire.options)
    stream = filesystem.open_output("a")
    gone = wire.proxy.next("gone", method="PUT", path=PART, times=1 << 30, skip=0 if at == "write" else 2)

    def use() -> None:
        stream.write(bytes(2 * PART_NBYTES + 5))
        assert at == "close"
        stream.close()

    with pytest.raises(errors.StorageError, match="404"):
        use()
    gone.end()
    stream.abort()
    assert wire.names() == []


@pytest.mark.parametrize("fault", ["unavailable", "silent", "reset"])
@pytest.mark.parametrize(("method", "path"), [("PUT", PART), ("POST", PUBLISH)])
def test_an_outage_ends_in_time_and_the_writer_saves_again(wire: Wire, fault: str, method: str, path: str) -> None:
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


def test_what_lands_late_does_not_undo_what_another_save_published(wire: Wire) -> None:
    assert save(wire.writer(), 1) is None
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="POST", path=PUBLISH)
    wire.proxy.next("unavailable", method="POST", path=PUBLISH, times=1 << 30)
    error = save(wire.writer(deadline=4), 2)
    assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert save(wire.writer(direct=True), 3) is None
    wire.proxy.land()
    assert wire.load() == 3


def test_a_last_part_that_lands_after_the_abort_makes_no_object(wire: Wire) -> None:
    filesystem = open_filesystem(wire.url, storage_options=wire.options, deadline_seconds=3)
    stream = filesystem.open_output("a")
    stream.write(bytes(2 * PART_NBYTES))
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="PUT", path=PART)
    outage = wire.proxy.next("unavailable", method="PUT", path=PART, times=1 << 30)
    with pytest.raises(errors.StorageError):
        stream.close()
    outage.end()
    stream.abort()
    wire.proxy.land()
    assert wire.names() == []


def test_who_publishes_too_often_waits(wire: Wire) -> None:
    """It was certainly not done: another save's checkpoint may come in between, and nothing has to be kept."""
    assert save(wire.writer(), 1) is None
    wire.proxy.next("busy", method="POST", path=PUBLISH, times=3)
    assert save(wire.writer(), 2) is None
    wire.proxy.next("busy", method="POST", path=PUBLISH, times=1 << 30)
    error = save(wire.writer(deadline=2), 3)
    assert isinstance(error, errors.StorageError) and "429" in str(error) and not error.outcome_unknown
    assert wire.load() == 2 and len(wire.names()) == 3


def test_what_lands_late_before_it_is_sent_again_is_ours(wire: Wire) -> None:
    assert save(wire.writer(), 1) is None
    lost = wire.proxy.next("lost", method="POST", path=PUBLISH)
    look = wire.proxy.next("unavailable", method="GET", path=".metadata?alt=media", times=2)
    assert save(wire.writer(), 2) is None
    assert lost.left == look.left == 0
    assert wire.load() == 2


def test_each_refusal_is_told_at_once(wire: Wire) -> None:
    gone = wire.proxy.next("gone", method="POST", path=PUBLISH, times=1 << 30)
    start = time.monotonic()
    error = save(wire.writer(deadline=60), 1)
    assert time.monotonic() - start < 10
    assert isinstance(error, errors.StorageError) and not error.outcome_unknown
    gone.end()
    assert save(wire.writer(), 2) is None
