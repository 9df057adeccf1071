"""Processes that save and are killed on the way, forked from one that has torch."""

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
