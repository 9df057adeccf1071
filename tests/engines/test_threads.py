"""WorkerGroup: no thread outlives its call, and the first error of any thread is the one that is raised."""

from __future__ import annotations

import signal
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


@pytest.mark.usefixtures("keyboard_interrupts")
def test_an_interrupted_wait_waits_on() -> None:
    """Thread.join takes a thread for dead once it was interrupted (in CPython 3.11)."""
    group, may_end, ended = Group(), threading.Event(), threading.Event()

    def interrupts() -> None:
        time.sleep(0.2)  # until `run` waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.5)
        may_end.set()

    def job() -> None:
        assert may_end.wait(60)
        time.sleep(0.2)
        ended.set()

    timer = threading.Thread(target=interrupts)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        group.run(job)
    assert ended.is_set() and no_worker_is_left()
    timer.join()


def test_an_error_outside_of_the_worker_s_own_handling_counts() -> None:
    queue: SimpleQueue[None] = SimpleQueue()
    workers = WorkerGroup([queue])
    with pytest.raises(OSError, match="at once"):
        workers.run(lambda: workers.start("test-1", fails("at once")))
    assert no_worker_is_left()


def test_a_thread_that_can_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def can_not(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", can_not)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Group().run()
