"""Work beside training: on streams that it does not use, and with memory that it does not get before it is read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda import fallback, streams
from dcp_nvcomp.engines.cuda.encode import EncodeJob
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.streams import stream_beside
from dcp_nvcomp.saving.encode import sources
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.encode.sources import (
    AcceleratorSource,
    Part,
    PendingRecord,
    Ready,
    Source,
    Workbench,
    encode_parts,
)
from dcp_nvcomp.saving.save import CallersStreams

from .cases import CHAIN

GPU = torch.device("cuda", 0)


class Stream:
    """A stream of torch's, as far as it is used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited_for: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Stream | None]:
    """Returns the stream that is current; None for the one that training uses."""
    entered: list[Stream] = []

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        entered.append(stream)
        yield
        assert entered.pop() is stream

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    streams._FREE.clear()
    yield lambda: entered[-1] if entered else None
    streams._FREE.clear()


def test_a_stream_is_lent_to_one_at_a_time_and_made_once(current: Callable[[], Stream | None]) -> None:
    with stream_beside(GPU, cast(Any, "queued")):
        first = current()
        assert first is not None and first.device == GPU and first.waited_for == ["queued"]
        with stream_beside(GPU):
            second = current()
            assert second is not first
        with stream_beside(torch.device("cuda", 1)):
            assert current() not in (first, second)
    for _ in range(40):  # torch would give out one after the other of its 32, each with memory of its own
        with stream_beside(GPU):
            assert current() in (first, second)
    with pytest.raises(ZeroDivisionError), stream_beside(GPU):
        1 / 0  # noqa: B018
    assert len(streams._FREE[GPU]) == 2


def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, current: Callable[[], Stream | None]) -> list[Stream | None]:
    """Have tensors be ready after an event; returns the streams on which they are then copied."""
    copied: list[Stream | None] = []
    host_copy = sources.host_copy

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(current())
        return host_copy(tensor)

    monkeypatch.setattr(sources, "_ready_event", lambda tensor: "queued")
    for module in (sources, fallback):
        monkeypatch.setattr(module, "host_copy", copy)
    return copied


def _assert_beside(copied: list[Stream | None]) -> None:
    assert copied
    for stream in copied:
        assert stream is not None and set(stream.waited_for) == {"queued"}


def test_what_the_cpu_engine_takes_from_a_gpu(
    monkeypatch: pytest.MonkeyPatch, current: Callable[[], Stream | None]
) -> None:
    copied = _as_on_a_gpu(monkeypatch, current)
    ((record, source),) = _packed("zstd", {"a": torch.arange(5000)})
    _encoded(record, source)
    _assert_beside(copied)


def test_what_is_left_to_it(monkeypatch: pytest.MonkeyPatch, current: Callable[[], Stream | None]) -> None:
    copied = _as_on_a_gpu(monkeypatch, current)
    tensor = torch.randn(5000).view(torch.uint8)
    room = memoryview(bytearray(CHAIN.max_encoded_nbytes(tensor.nbytes)))
    CopyingEngine().encode_block(EncodeJob((tensor,), CHAIN, cast(Any, "queued")), room)
    _assert_beside(copied)


def test_a_save_follows_its_caller(monkeypatch: pytest.MonkeyPatch, current: Callable[[], Stream | None]) -> None:
    followed = CallersStreams({})
    followed._events[GPU] = cast(Any, "queued")
    with followed.followed():
        _assert_beside([current()])
    assert current() is None


class _LeavesAllToTheCpu(EngineChoice):
    """Every tensor is on a GPU, which encodes none."""

    def on_cuda(self, device: torch.device) -> bool:
        return True

    def serves(self, *_: Any) -> bool:
        return False


def _packed(codec: str, tensors: dict[str, torch.Tensor]) -> list[Ready]:
    """Return the packs of small tensors, which are taken out of the dict."""
    chooser = NvcompWriter("unused", codec=codec).options.chooser
    maker = RecordMaker(chooser, _LeavesAllToTheCpu("auto"), RememberedChoices(), pack=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    items = planner.create_local_plan().items
    return [one for item in items for one in maker.add(item, tensors.pop(item.index.fqn))] + maker.flush()


def _encoded(record: PendingRecord, source: Source) -> None:
    assert isinstance(source, AcceleratorSource)
    room = memoryview(bytearray(2 * record.nbytes + 4096))
    part = Part(source, record.choice, [record.grid.box(0)])
    encode_parts([part], lambda: room, Workbench(EnginePolicy(1 << 20)))


@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_what_a_pack_is_joined_from_stays_until_it_is_encoded(codec: str) -> None:
    """A GPU may join it later than the thread that starts that goes on; copies would be training's by then."""
    tensors = {str(number): torch.arange(number, number + 100) for number in range(20)}
    expected = torch.cat([*tensors.values()])
    held = [weakref.ref(tensor) for tensor in tensors.values()]
    ((record, source),) = _packed(codec, tensors)
    assert isinstance(source, AcceleratorSource) and torch.equal(source.tensor.view(torch.int64), expected)
    gc.collect()
    assert all(tensor() is not None for tensor in held)
    _encoded(record, source)
    del source
    gc.collect()
    assert all(tensor() is None for tensor in held)
