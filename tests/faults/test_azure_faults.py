"""Faults between us and an Azure Blob server: a save ends complete or invisible, a load bit-exact or with an error."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter, errors
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import load
from tests.states import State, assert_same

from .proxy import FaultProxy

pytestmark = pytest.mark.azure

PART_NBYTES = 5 << 20


class Wire:
    """A fresh directory on a server, and the proxy before it."""

    def __init__(self, store: tuple[str, dict[str, Any]], proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.url, self.direct = store
        key = re.search(r"AccountKey=([^;]+)", self.direct["connection_string"])
        assert key is not None
        self.options = {
            "account_name": "ckpt",
            "account_key": key[1],
            "endpoint": f"{proxy.url}/ckpt",
            "default_block_size": PART_NBYTES,
        }

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
def wire(azure_store: tuple[str, dict[str, Any]]) -> Iterator[Wire]:
    endpoint = re.search(r"BlobEndpoint=(http://[^/;]+)", azure_store[1]["connection_string"])
    assert endpoint is not None
    with FaultProxy(endpoint[1], seed=4) as proxy:
        yield Wire(azure_store, proxy)


def state_of(seed: int) -> State:
    """Return a tensor of several blocks of an upload, filled with the seed."""
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


@pytest.mark.parametrize("path", [".metadata", "comp=blocklist", "comp=block&"])
def test_a_request_whose_answer_is_lost_was_done_once(wire: Wire, path: str) -> None:
    assert save(wire.writer(), 1) is None
    target = wire.proxy.next("lost", method="PUT", path=path)
    assert save(wire.writer(), 2) is None
    assert target.left == 0
    assert len(wire.names()) == 3 and wire.load() == 2


@pytest.mark.parametrize("fault", ["unavailable", "silent", "reset"])
@pytest.mark.parametrize("path", ["comp=block", ".metadata"])
def test_an_outage_ends_in_time_and_the_writer_saves_again(wire: Wire, fault: str, path: str) -> None:
    writer = wire.writer(deadline=6)
    assert save(writer, 1) is None
    outage = wire.proxy.next(fault, method="PUT", path=path, times=1 << 30)
    start = time.monotonic()
    error = save(writer, 2)
    assert error is not None and time.monotonic() - start < 25  # of several operations
    assert wire.load() == 1
    outage.end()
    assert save(writer, 3) is None
    assert wire.load() == 3


def test_a_frozen_server_is_told_within_the_deadline(wire: Wire) -> None:
    """A look at what went wrong does not begin another deadline, nor does the removal of what is left."""
    deadline = 18.0
    filesystem = open_filesystem(wire.url, storage_options=wire.options, deadline_seconds=deadline)
    stream = filesystem.open_output("large")
    stream.write(bytes(2 * PART_NBYTES))
    wire.proxy.next("silent", method="PUT", path="comp=blocklist", times=1 << 30)
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
    assert time.monotonic() - start < 5


def test_what_lands_late_does_not_undo_what_another_save_published(wire: Wire) -> None:
    assert save(wire.writer(), 1) is None
    wire.proxy.late_seconds = None
    wire.proxy.next("late", method="PUT", path="/.metadata")
    wire.proxy.next("unavailable", method="PUT", path="/.metadata", times=1 << 30)
    error = save(wire.writer(deadline=4), 2)
    assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert save(wire.writer(direct=True), 3) is None
    wire.proxy.land()
    assert wire.load() == 3


def test_what_lands_late_before_it_is_sent_again_is_ours(wire: Wire) -> None:
    assert save(wire.writer(), 1) is None
    wire.proxy.next("lost", method="PUT", path="/.metadata")
    wire.proxy.next("unavailable", method="HEAD", path="/.metadata", times=2)
    assert save(wire.writer(), 2) is None
    assert wire.load() == 2


def test_each_refusal_is_told_at_once(wire: Wire) -> None:
    gone = wire.proxy.next("gone", method="PUT", path="/.metadata", times=1 << 30)
    start = time.monotonic()
    error = save(wire.writer(deadline=60), 1)
    assert time.monotonic() - start < 10
    assert isinstance(error, errors.StorageError) and error.errno == errno.ENOENT and not error.outcome_unknown
    gone.end()
    assert save(wire.writer(), 2) is None
