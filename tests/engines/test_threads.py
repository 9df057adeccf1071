"""WorkerGroup: no thread outlives its call, and the first error of any thread is the one that is raised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from dcp_nvcomp.engines.threads import WorkerGroup


class Group:
    """Two workers on one queue of jobs."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.failures: list[BaseException | None] = []
        self.workers = WorkerGroup([self.jobs], lambda: self.failures.append(self.workers.error))

    def run(self, *jobs: Callable[[], None], then: Callable[[], None] = lambda: None) -> None:
        self.workers.run(lambda: self._feed(jobs, then))

    def _feed(self, jobs: tuple[Callable[[], None], ...], then: Callable[[], None]) -> None:
        for name in ("test-1", "test-2"):
            self.workers.start(name, self._work)
        for job in jobs:
            self.jobs.put(job)
        then()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self.workers.fail(error)
        self.jobs.put(None)


def no_worker_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def fails(message: str, after: threading.Event | None = None) -> Callable[[], None]:
    def job() -> None:
        assert after is None or after.wait(60)
        raise OSError(message)

    return job


def wait_for(failures: list[BaseException | None], then: threading.Event) -> None:
    """Let go of what waits for `then` once the first failure is recorded."""
    while not failures:
        time.sleep(0.001)
    then.set()


def test_everything_that_was_sent_is_done_before_run_returns() -> None:
    group, done = Group(), list[int]()
    group.run(*(lambda number=number: done.append(number) for number in range(100)))  # type: ignore[misc]
    assert sorted(done) == list(range(100)) and group.workers.error is None
    assert no_worker_is_left()


def test_the_first_error_is_raised() -> None:
    group, first = Group(), threading.Event()
    with pytest.raises(OSError, match="first"):
        group.run(fails("second", after=first), fails("first"), then=lambda: wait_for(group.failures, first))
    assert [str(error) for error in group.failures] == ["first", "first"]
    assert no_worker_is_left()


def test_an_error_of_the_calling_thread_waits_for_the_workers() -> None:
    group, late = Group(), threading.Event()

    def interrupted() -> None:
        threading.Timer(0.2, late.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.run(lambda: late.wait(60) and None, then=interrupted)
    assert late.is_set() and no_worker_is_left()
