"""Encoding that gives way to training, until it has to hurry.

Patient threads have the lowest priority: they take what cores have left. Nobody without privileges may raise a priority
again, so beside them wait as many threads of ordinary priority, for the moment at which the save has to hurry.

This is for a process of its own. Beside training's own threads a patient one that holds the GIL, but no core, holds all
of them up.
"""

from __future__ import annotations

import os
import threading
import time

_LOWEST = 19
_OF_THE_TIME = 0.8  # by then it should be done
_BEHIND = 0.2  # so much of it may be late: pace is uneven, and the process may still be starting


class Patience:
    """Whether one save may still give way."""

    def __init__(self, within_seconds: float | None = None) -> None:
        self._nbytes = 0
        self._within_seconds = within_seconds
        self._began_seconds = time.perf_counter()
        self._done_nbytes = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    @property
    def is_over(self) -> bool:
        """True once the save has to hurry."""
        return self._is_over.is_set()

    def begin(self, nbytes: int) -> None:
        """Note how much there is to encode."""
        self._nbytes = nbytes

    def hurry(self) -> None:
        """Give way no longer."""
        self._is_over.set()

    def encoded(self, nbytes: int) -> None:
        """Note what was encoded."""
        with self._lock:
            self._done_nbytes += nbytes

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until the save has to hurry: if told to, or falling behind. Return whether it has."""
        if self._is_late():
            self.hurry()
        return self._is_over.wait(seconds)

    def _is_late(self) -> bool:
        if self._within_seconds is None:
            return False
        spent = time.perf_counter() - self._began_seconds
        wanted = spent / (self._within_seconds * _OF_THE_TIME) - _BEHIND
        return self._done_nbytes < self._nbytes * min(wanted, 1.0)

    def give_way(self) -> None:
        """Give the calling thread the lowest priority."""
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        except OSError:  # a sandbox may forbid even that
            self.hurry()
