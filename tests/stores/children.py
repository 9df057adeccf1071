"""Processes that save: one that is killed on the way, or two at the same time; forked from one that has torch."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

from tests.faults.forked import PRELOADED

from .calls import Counted, interposed
from .places import Place

LIMIT_SECONDS: Final = 300.0  # ends what hangs
_MEETING_SECONDS: Final = 60.0

CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*PRELOADED, "s3fs", "gcsfs", "obstore.store", __name__])


class Killing(Counted):
    """A hook under which the process kills itself."""

    def __init__(self, at: int, *, within: bool) -> None:
        super().__init__()
        self._at, self._within = at, within

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if at == self._at:
            if self._within:
                threading.Timer(random.uniform(0, 0.004), _kill_this).start()
            else:
                _kill_this()
        elif at > self._at and not self._within:
            raise AssertionError("it goes on after it was killed")
        return call(*arguments, **options)


def _kill_this() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_until_killed(place: Place, first: int, at: int | None, within: bool, told: Any) -> None:
    """Save twice with one writer, and be killed in the second save."""
    warnings.simplefilter("ignore")
    writer = place.writer()
    assert place.save(first, writer) is None
    counted = Counted() if at is None else Killing(at, within=within)
    with interposed(counted):
        assert place.save(first + 1, writer) is None
    told.send(counted.names)
    if within:
        time.sleep(1)
        _kill_this()


def run_killed(place: Place, first: int, at: int | None, *, within: bool = False) -> list[str] | None:
    """Let a process save twice, killed before or within the second save's call `at`; return that save's calls."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_save_until_killed, args=(place, first, at, within, theirs))
    child.start()
    theirs.close()
    try:
        names: list[str] | None = ours.recv()
    except EOFError:
        names = None
    child.join(LIMIT_SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError("the child hangs")
    assert child.exitcode == (0 if at is None else -signal.SIGKILL), child.exitcode
    return names


def _save_often(place: Place, writer_number: int, rounds: int, seed: int, barrier: Any, told: Any) -> None:
    warnings.simplefilter("ignore")
    draw = random.Random(seed)

    class Pausing(Counted):
        def carry_out(self, at: int, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if draw.random() < 0.3:
                time.sleep(draw.uniform(0, 0.03))
            return call(*arguments, **options)

    writer = place.writer()
    for number in range(rounds):
        barrier.wait(_MEETING_SECONDS)
        with interposed(Pausing()):
            error = place.save(2 * number + writer_number, writer)
        told.send(
            None if error is None else (type(error).__name__, getattr(error, "outcome_unknown", False), str(error))
        )
        barrier.wait(_MEETING_SECONDS)  # what is there now is looked at
        barrier.wait(_MEETING_SECONDS)


def run_two_writers(place: Place, rounds: int, seed: int, look: Callable[[int, list[Any]], None]) -> None:
    """Let two processes save `2 * round` and the number after it at the same time; then `look(round, outcomes)`."""
    barrier = CONTEXT.Barrier(3)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    children = [
        CONTEXT.Process(target=_save_often, args=(place, number, rounds, 2 * seed + number, barrier, theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        for number in range(rounds):
            barrier.wait(_MEETING_SECONDS)
            outcomes = [ours.recv() for ours, _ in pipes]
            barrier.wait(_MEETING_SECONDS)
            look(number, outcomes)
            barrier.wait(_MEETING_SECONDS)
    finally:
        for child in children:
            child.join(10)
            if child.exitcode is None:
                child.kill()
                child.join()
