"""Encoding that gives way: at the lowest priority, until it falls behind or is told to hurry."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from dcp_nvcomp.saving import job as module
from dcp_nvcomp.saving.job import BackgroundThrottle


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_thread_that_gives_way_has_the_lowest_priority() -> None:
    found: list[int] = []

    def work() -> None:
        BackgroundThrottle().give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_where_priorities_are_forbidden_it_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    throttle = BackgroundThrottle()
    throttle.give_way()
    assert throttle.is_over


def test_without_a_limit_it_never_hurries(clock: Clock) -> None:
    throttle = BackgroundThrottle()
    throttle.begin(100)
    clock.seconds += 1e6
    assert not throttle.wait(0)
    throttle.hurry()
    assert throttle.wait(0)


@pytest.mark.parametrize(
    ("seconds", "done", "hurries"),
    [(1, 0, False), (10, 0, True), (10, 3, True), (10, 12, False), (35, 89, True), (35, 90, False), (60, 99, True)],
)
def test_it_hurries_if_it_falls_behind(clock: Clock, seconds: float, done: int, hurries: bool) -> None:
    """Of 100, within 40 seconds: it should be done after 32, and may be 20 late."""
    throttle = BackgroundThrottle(40.0)
    throttle.begin(100)
    throttle.encoded(done)
    clock.seconds += seconds
    assert throttle.wait(0) == hurries == throttle.is_over


def test_whoever_waits_is_woken() -> None:
    throttle = BackgroundThrottle()
    threading.Timer(0.05, throttle.hurry).start()
    start = time.monotonic()
    assert throttle.wait(60)
    assert time.monotonic() - start < 30
