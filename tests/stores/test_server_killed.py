"""The server is killed in the middle of an upload of 100 MB; it is started again, or is not for a long time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.errors import CheckpointError, StorageError

from .calls import Counted, interposed
from .conftest import fresh
from .kinds import SERVED, Served
from .places import Place

_NBYTES = 100_000_000
_OLD, _NEW, _NEXT = 1, 2, 3
_DOWN_SECONDS = 1.0
_DEADLINE_SECONDS = 60.0
_SHORT_SECONDS = 3.0  # where nothing comes back, and all of it is waited for


class Interrupting(Counted):
    """A hook that does something once, as soon as so many bytes were written."""

    def __init__(self, nbytes: int, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._interrupt = nbytes, interrupt

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if name == "write" and self._left > 0:
            self._left -= memoryview(arguments[0]).nbytes
            if self._left <= 0:
                self._interrupt()
        return call(*arguments, **options)

    @property
    def is_done(self) -> bool:
        """True if it did."""
        return self._left <= 0


@dataclass(frozen=True)
class Trial:
    """A place on a server with a small checkpoint, and the save of a large one with one writer."""

    small: Place  # the place, for small states
    large: Place  # the same for the large one
    server: Served  # what can be killed

    def save_large(self, writer: NvcompWriter, interrupt: Callable[[], None]) -> CheckpointError | None:
        """Save the large state, and do something when half of it is written."""
        state, hook = self.large.state(_NEW), Interrupting(_NBYTES // 2, interrupt)
        with interposed(hook):
            error = self.large.save(_NEW, writer, state=state)
        assert hook.is_done
        return error

    def check(self, error: CheckpointError | None, writer: NvcompWriter) -> None:
        """Make sure that what should be there loads, and that the writer's next save works."""
        assert self.small.loaded() == _OLD if error is not None else self.large.loaded() == _NEW
        assert self.small.save(_NEXT, writer) is None
        assert self.small.loaded() == _NEXT


@pytest.fixture(params=SERVED)
def trial(request: pytest.FixtureRequest, kind_named: Callable[[str], Any]) -> Iterator[Trial]:
    """A server with a small checkpoint, which runs again when the test is over."""
    server: Served = kind_named(request.param)
    for place in fresh(server):
        assert place.save(_OLD) is None
        yield Trial(place, replace(place, nbytes=_NBYTES), server)


@pytest.mark.ci
def test_it_is_started_again(trial: Trial) -> None:
    """Within the deadline: so the save goes on, or says that it failed."""
    starting = threading.Timer(_DOWN_SECONDS, trial.server.start)

    def kill() -> None:
        trial.server.kill()
        starting.start()

    writer = trial.large.within(_DEADLINE_SECONDS).writer()
    began = time.monotonic()
    error = trial.save_large(writer, kill)
    took = time.monotonic() - began
    starting.join()
    assert took < _DEADLINE_SECONDS
    assert error is None or isinstance(error, StorageError), error
    trial.check(error, writer)


@pytest.mark.ci
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_it_stays_away(trial: Trial, how: str) -> None:
    """No connection at all, or no answer at all: an error in time that names the place, and no harm."""
    server = trial.server
    away, back = (server.kill, server.start) if how == "killed" else (server.freeze, server.thaw)
    writer = trial.large.within(_SHORT_SECONDS).writer()
    began = time.monotonic()
    error = trial.save_large(writer, away)
    took = time.monotonic() - began
    back()
    assert isinstance(error, StorageError), error
    assert error.path is not None and trial.small.plain_url in error.path, error
    # what is written, and the clean-up after it, one deadline each; the rest is the machine's
    assert took < 2 * _SHORT_SECONDS + 20, took
    trial.check(error, writer)
