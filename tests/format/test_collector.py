"""The garbage collector waits while asked to, and is always left as it was found."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from dcp_nvcomp.format import collector
from dcp_nvcomp.format.collector import collector_paused
from tests.faults import forked


@pytest.fixture(autouse=True)
def collector_restored() -> Iterator[None]:
    yield
    assert collector._waiting_for == 0
    gc.enable()


def test_it_waits_and_goes_on() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collector_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_a_collector_that_was_disabled_stays_so() -> None:
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_the_last_of_several_threads_lets_it_go_on() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_forked_child_has_its_collector() -> None:
    """A child that is forked during a load has none of the threads that would end the pause."""
    code = """
import gc, os
from dcp_nvcomp.format.collector import collector_paused
with collector_paused():
    child = os.fork()
    if child == 0:
        assert gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not gc.isenabled()
assert gc.isenabled()
"""
    done = forked.execute(code)
    assert done.returncode == 0, done.stderr
