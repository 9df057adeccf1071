"""A worker of a save or a load that fails before its first piece of work: the call raises, and does not hang."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp.loading.job import LoadJob
from tests.checkpoints import load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {f"w{n}": torch.full((1 << 20,), 1.0) for n in range(6)}
WORKERS = pytest.mark.parametrize("failing", [2, 1], ids=["all workers", "one worker"])


def fails_at_first(made: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Return a constructor that lacks memory when it is first called."""
    calls = itertools.count()

    def make(*args: Any) -> Any:
        if next(calls) < times:
            raise MemoryError("no memory for a worker")
        return made(*args)

    return make


def in_time(call: Callable[[], Any]) -> BaseException | None:
    """Return what a call raises; fail if it has not returned in a minute."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert raised, "it hangs"
    return raised[0]


def no_worker_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-")]


@WORKERS
def test_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    from dcp_nvcomp.saving import job

    monkeypatch.setattr(job, "Workbench", fails_at_first(job.Workbench, failing))
    error = in_time(lambda: save(tmp_path, STATE, thread_count=2, engine="cpu"))
    assert isinstance(error, CheckpointException) and isinstance(error.failures[0][0], MemoryError)
    assert list(tmp_path.iterdir()) == [] and no_worker_is_left()


@WORKERS
def test_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    from dcp_nvcomp.loading import job

    save(tmp_path, STATE)
    monkeypatch.setattr(job, "Decoder", fails_at_first(job.Decoder, failing))
    error = in_time(lambda: load(tmp_path, STATE, thread_count=2, engine="cpu"))
    assert isinstance(error, CheckpointException) and isinstance(error.failures[0][0], MemoryError)
    assert no_worker_is_left()


def test_a_load_never_ends_without_an_error_and_without_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its threads did nothing at all."""
    save(tmp_path, STATE)
    monkeypatch.setattr(LoadJob, "_load", lambda self, ahead, gpu: None)
    error = in_time(lambda: load(tmp_path, STATE, engine="cpu"))
    assert isinstance(error, CheckpointException) and "6 of 6 items were not loaded" in str(error.failures[0][0])
