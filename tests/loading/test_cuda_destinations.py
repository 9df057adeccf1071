"""Destinations on a GPU that are filled by copies, which CUDA only queues: a load waits for them.

No GPU is needed: the destination says that it is on one, and its memory is the host's.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from dcp_nvcomp import NvcompReader
from dcp_nvcomp.errors import CorruptDataError
from tests.checkpoints import save

_DEVICE = torch.device("cuda", 0)

Events = list[tuple[str, int]]  # what happened, and on which thread


class _OnGpu(torch.Tensor):
    """A tensor of the host that says it is on a GPU, and notes the copies that go into it and its parts."""

    events: Events

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _DEVICE

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        events = next(one.events for one in args if isinstance(one, _OnGpu))
        found = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.copy_:
            events.append(("copied", threading.get_ident()))
        if isinstance(found, _OnGpu):
            found.events = events
        return found


def _on_gpu(tensor: torch.Tensor, events: Events) -> _OnGpu:
    found = tensor.as_subclass(_OnGpu)
    found.events = events
    return found


class _Noting(DefaultLoadPlanner):
    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._events.append(("committed", threading.get_ident()))


@pytest.mark.parametrize("shape", [(40, 6), (300_000, 4)], ids=["packed", "alone"])
def test_a_load_waits_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    events: Events = []

    class Stream:
        def synchronize(self) -> None:
            events.append(("waited", threading.get_ident()))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    saved = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    save(tmp_path, {"weight": saved})
    into = torch.zeros(shape[::-1]).T
    reader = NvcompReader(tmp_path, engine="cpu")
    dcp.load({"weight": _on_gpu(into, events)}, storage_reader=reader, planner=_Noting(events), no_dist=True)
    assert torch.equal(into, saved)
    copies = [at for at, (what, _) in enumerate(events) if what == "copied"]
    committed = events.index(("committed", threading.get_ident()))
    assert copies and max(copies) < committed
    for at in copies:
        # on the thread that has queued the copy, as streams are a thread's own
        assert ("waited", events[at][1]) in events[at:committed]


def test_a_broken_gpu_does_not_hide_why_a_load_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports an error at every later call; a load that fails waits for its copies all the same."""
    waited, caller = list[int](), threading.get_ident()

    class Stream:
        def synchronize(self) -> None:
            if threading.get_ident() != caller:
                waited.append(threading.get_ident())
                raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    save(tmp_path, {"weight": torch.randn(300_000, 4)})
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    into = {"weight": _on_gpu(torch.zeros(4, 300_000).T, [])}
    with pytest.raises(CheckpointException, match="CRC") as caught:
        dcp.load(into, storage_reader=NvcompReader(tmp_path, engine="cpu"), no_dist=True)
    assert waited and all(isinstance(error, CorruptDataError) for error, _ in caught.value.failures.values())
