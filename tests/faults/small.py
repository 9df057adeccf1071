"""A small checkpoint, and the question that is asked after every fault: which one loads, bit for bit?"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from tests.states import assert_same, blank

State = dict[str, Any]


def a_state(seed: int) -> State:
    """Coded, stored and packed tensors and a Python object, a few KB together, all of them different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(700, generator=generator).bfloat16(),
        "v": torch.rand(50, 30, generator=generator),
        "b": torch.randn(3, generator=generator),
        "step": {"number": seed},
    }


def save(path: Path | str, state: State, **options: Any) -> NvcompWriter:
    """Save on one thread, so that calls come in the same order each time."""
    writer = NvcompWriter(path, thread_count=1, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return writer


def load(path: Path | str, like: State, **options: Any) -> State:
    """Load what has these keys and shapes."""
    into: State = blank(like)
    dcp.load(into, storage_reader=NvcompReader(path, thread_count=1, **options), no_dist=True)
    return into


def same(actual: State, expected: State) -> bool:
    """Whether two states are the same bit for bit."""
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def what_loads(path: Path | str, *states: State) -> int | None:
    """Which of the states the checkpoint holds; None where there is no checkpoint.

    Raises:
        AssertionError: it holds something else: the lie that must never be.
        CheckpointError, CheckpointException: there is one, and it can't be loaded.
    """
    try:
        NvcompReader(path).read_metadata()  # of what dcp.load meets there, it tells the text only
    except errors.CheckpointNotFoundError:
        return None
    found = load(path, states[0])
    which = [number for number, state in enumerate(states) if same(found, state)]
    assert len(which) == 1, "a load returned what was never saved"
    return which[0]


@dataclass(frozen=True)
class Failure:
    """What a save or load raised, without the traceback, which would keep alive what was in use then.

    Attributes:
        kind: the class of what the rank raised.
        number: its errno.
        path: where it says that it happened.
        text: all of it.
    """

    kind: type[BaseException]
    number: int | None
    path: str | None
    text: str


def failure_of(work: Callable[[], object]) -> Failure | None:
    """What some work fails with; None where it does not. Nothing but CheckpointException may leave DCP."""
    try:
        work()
    except CheckpointException as error:
        cause = error.failures[0][0]
        return Failure(type(cause), getattr(cause, "errno", None), getattr(cause, "path", None), str(cause))
    return None


def file_names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if entry.is_file()} if path.exists() else set()


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """No descriptor and no thread outlives the block."""
    before = _descriptors()
    yield
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp-") and thread.is_alive()]
    assert not threads, threads
    if _descriptors().keys() - before.keys():
        gc.collect()  # an error that was raised may be part of a cycle, and its traceback holds what was open then
    left = {number: what for number, what in _descriptors().items() if number not in before}
    assert not left, f"descriptors left open: {left}"


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found
