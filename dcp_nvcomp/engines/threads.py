"""Threads that work for one call: the first error of any of them ends the work, and none outlives the call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any


class _Worker:
    """A thread of a group, and whether it has ended.

    `Thread.is_alive` is of no use: in CPython 3.11 it is False after an interrupted `join`, whatever the thread does.
    So is an Event: an interrupt of the waiting thread may leave its lock held.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.has_ended = False
        self._begun = threading.Lock()
        self._running = threading.Lock()
        self._running.acquire()

    def begin(self) -> bool:
        """True for the first caller: only it may do the work."""
        return self._begun.acquire(blocking=False)

    def end(self) -> None:
        self.has_ended = True
        self._running.release()

    def wait(self) -> None:
        while not self.has_ended:
            self._running.acquire()
        if self.thread is not None:
            self.thread.join()  # it has nothing left to do


class WorkerGroup:
    """Threads that take their work from queues which the calling thread fills.

    A worker keeps taking messages after a failure, without acting on them, so that nothing waits for it. It reports its
    errors to `fail`, and ends at the message None; if workers share a queue, each passes that message on. An error that
    it raises counts too, but what waits for the messages that it no longer takes has to look at `error`.
    """

    def __init__(self, queues: Iterable[SimpleQueue[Any]], on_failure: Callable[[], None] | None = None) -> None:
        self._queues = tuple(queues)
        self._on_failure = on_failure
        self._started: list[_Worker] = []
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def start(self, name: str, work: Callable[..., None], *args: Any) -> None:
        """Start a worker. To be called on the calling thread only."""
        worker = _Worker()
        self._started.append(worker)
        try:
            thread = threading.Thread(target=self._run_worker, args=(worker, work, args), name=name)
            thread.start()
        except BaseException:
            if worker.begin():  # it is not running, nor will it if an interrupt came first
                worker.end()
            raise
        worker.thread = thread

    def _run_worker(self, worker: _Worker, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not worker.begin():
            return
        try:
            work(*args)
        except BaseException as error:
            self.fail(error)
        finally:
            worker.end()

    def fail(self, error: BaseException) -> None:
        """Record an error, of any thread. Only the first one counts."""
        with self._lock:
            if self.error is None:
                self.error = error
        if self._on_failure is not None:
            self._on_failure()

    def run(self, feed: Callable[[], None]) -> None:
        """Feed the workers on this thread, then wait until all of them have ended."""
        try:
            feed()
        except BaseException as error:  # KeyboardInterrupt too must not leave threads and files behind
            self.fail(error)
        for queue in self._queues:
            queue.put(None)
        self._join()
        if self.error is not None:
            raise self.error

    def _join(self) -> None:
        for worker in self._started:
            while True:
                try:
                    worker.wait()
                    break
                except BaseException as error:
                    # An interrupted wait goes on: a thread that outlived the call would write into files or tensors
                    # that are no longer the call's.
                    self.fail(error)
