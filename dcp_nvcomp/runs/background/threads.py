"""A thread of a manager, and the steps that its threads are bringing to the durable tier."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dcp_nvcomp.runs.tiers.durable import DurableTier

Job = Callable[[], None]


class Background:
    """Does jobs one after the other, on a thread that is there as long as there are any."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name, self._on_error = name, on_error
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self.waiting = 0

    def do(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self.waiting += 1
            is_idle = self.waiting == 1
        if not is_idle:
            return
        # not a daemon: the interpreter waits for it, so that a save that has begun is finished
        thread = threading.Thread(target=self._work, name=self._name)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts no threads any more
            self._work()

    def wait_for(self, most_waiting: int = 0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.waiting <= most_waiting)

    def _work(self) -> None:
        while True:
            job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:
                self._on_error(error)
            finally:
                del job  # it may hold a state
            with self._changed:
                self.waiting -= 1
                self._changed.notify_all()
                if not self.waiting:
                    return


class OnTheirWay:
    """The steps that a manager is bringing to the durable tier; they are not removed meanwhile, from either tier."""

    def __init__(self, durable: DurableTier) -> None:
        self._durable = durable
        self._changed = threading.Condition()
        self._steps: list[int] = []  # a step that is saved twice is there twice

    def __len__(self) -> int:
        with self._changed:
            return len(self._steps)

    @property
    def steps(self) -> frozenset[int]:
        with self._changed:
            return frozenset(self._steps)

    def add(self, step: int) -> None:
        self._durable.hold(step)
        with self._changed:
            self._steps.append(step)

    def done(self, step: int) -> None:
        self._durable.let_go(step)
        with self._changed:
            self._steps.remove(step)
            self._changed.notify_all()

    def wait(self, most_waiting: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._steps) <= most_waiting)
