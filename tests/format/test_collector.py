"""The garbage collector waits while asked to, and is always left as it was found."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.format import collector
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.encode.tasks import BufferPool
from tests.faults import forked


@pytest.fixture(autouse=True)
def collector_restored() -> Iterator[None]:
    yield
    assert collector._waiting_for == 0
    gc.enable()


def test_it_waits_and_is_left_as_it_was() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_interrupt_at_any_moment_leaves_it_on() -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    interrupts, before = 0, signal.signal(signal.SIGVTALRM, interrupt)
    try:
        while interrupts < 100:
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4 * (1 + interrupts % 7))
                while True:
                    with collector_paused():
                        pass
            except Interrupt:
                interrupts += 1
            # only now: until then the traceback may hold what was interrupted before it could begin
            assert (gc.isenabled(), collector._waiting_for) == (True, 0), interrupts
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


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
from dcp_nvcomp.saving.encode.tasks import BufferPool
from dcp_nvcomp.saving.encode.records import RecordMaker
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


def test_planners_and_waits_are_not_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner may take long to resolve a tensor, and a save may wait for a buffer, while training goes on."""
    enabled: list[bool] = []

    class Watching(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            enabled.append(gc.isenabled())
            return super().resolve_data(write_item)

    reserve, add = BufferPool.reserve, RecordMaker.add
    paused: list[bool] = []
    monkeypatch.setattr(BufferPool, "reserve", lambda pool: (enabled.append(gc.isenabled()), reserve(pool)))
    monkeypatch.setattr(
        RecordMaker, "add", lambda maker, *item: (paused.append(not gc.isenabled()), add(maker, *item))[1]
    )
    state = {f"{number:03}": torch.randn(3000) for number in range(300)} | {"large": torch.randn(1 << 20)}
    dcp.save(state, storage_writer=NvcompWriter(tmp_path), planner=Watching(), no_dist=True)
    assert enabled and all(enabled)
    assert paused and all(paused), "or the pause is no longer where records are made"
