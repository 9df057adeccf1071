"""One thread of a manager: what is to be done behind training, in the same order on all ranks.

A job that fails is noted, and the others go on: each of them asks the other ranks whether it may. Errors wait for the
next call of the manager.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Background"]

Job = Callable[[], None]


class Background:
    """A thread that does jobs.

    Args:
        name: of the thread.
        on_error: called, on that thread, with what a job raised.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._changed = threading.Condition()
        self._waiting = 0
        # not a daemon: the interpreter waits for it, so that a save that has begun is finished
        self._thread = threading.Thread(target=self._work, name=name)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many jobs are not done."""
        return self._waiting

    def do(self, job: Job) -> None:
        """Do a job after those that were given before."""
        with self._changed:
            self._waiting += 1
        self._jobs.put(job)

    def wait_for(self, most_waiting: int = 0) -> None:
        """Wait until no more than this many jobs are not done."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting <= most_waiting)

    def close(self) -> None:
        """End the thread once its jobs are done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._on_error(error)
            finally:
                del job  # it may hold a state
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()
