"""Saves and loads on one thread, and the question after every fault: which state loads, bit for bit?"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from tests.checkpoints import load, save
from tests.states import State, same


def save_in_order(path: Path | str, state: State, **options: Any) -> NvcompWriter:
    """Save on one thread, so that calls come in the same order each time."""
    return save(path, state, thread_count=1, **options)


def load_in_order(path: Path | str, like: State, **options: Any) -> State:
    """Load on one thread, so that calls come in the same order each time."""
    return load(path, like, thread_count=1, **options)


def what_loads(path: Path | str, *states: State) -> int | None:
    """Return the number of the state that the checkpoint holds; None if there is no checkpoint."""
    try:
        NvcompReader(path).read_metadata()  # of what dcp.load meets there, it tells the text only
    except errors.CheckpointNotFoundError:
        return None
    found = load_in_order(path, states[0])
    which = [number for number, state in enumerate(states) if same(found, state)]
    assert len(which) == 1, "a load returned what was never saved"
    return which[0]


@dataclass(frozen=True)
class Failure:
    """The error of a save or load, without the traceback, which would keep alive what was in use then."""

    kind: type[BaseException]  # the class of what the rank raised
    number: int | None  # its errno
    path: str | None  # where it says that it happened
    text: str  # all of it


def failure_of(work: Callable[[], object]) -> Failure | None:
    """Return the failure of some work, or None if it succeeds. DCP may raise nothing but CheckpointException."""
    try:
        work()
    except CheckpointException as error:
        cause = error.failures[0][0]
        return Failure(type(cause), getattr(cause, "errno", None), getattr(cause, "path", None), str(cause))
    return None


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
