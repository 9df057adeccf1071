"""What may happen to the background process, and around it: it must cost a save at most, and never hang one."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from benchmarks.sinks import LimitedFileSystem
from dcp_nvcomp import NvcompWriter, errors
from dcp_nvcomp.saving.asynchronous import background as module
from dcp_nvcomp.saving.asynchronous import background_child
from dcp_nvcomp.saving.asynchronous.background import BackgroundProcess
from dcp_nvcomp.saving.asynchronous.background_child import own_package
from dcp_nvcomp.saving.process_state import forget_all, process_state
from dcp_nvcomp.storage.processes import StorageSettings, storage_of
from tests.checkpoints import assert_loads
from tests.saving.asynchronous.test_copies import (
    PATIENCE_SECONDS,
    begin,
    finish,
    like_a_new_process,  # noqa: F401
    one_process,  # noqa: F401
)
from tests.states import constant_state, small_state

assert LimitedFileSystem.protocol == "limited"


@pytest.fixture
def fresh() -> Iterator[None]:
    """A process of its own for a test that ends it, or changes how it begins."""
    forget_all()
    yield
    forget_all()


@pytest.fixture
def started() -> BackgroundProcess:
    """A process that has begun to work."""
    background = process_state().background()
    _wait_until(lambda: background._started.is_set())
    return background


def _wait_until(holds: Any) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_a_default_timeout_of_sockets_is_not_the_connections(tmp_path: Path) -> None:
    finish(begin(small_state(1), tmp_path / "a"))
    pid = process_state().background().pid
    socket.setdefaulttimeout(30)
    try:
        finish(begin(small_state(2), tmp_path / "b"))
    finally:
        socket.setdefaulttimeout(None)
    assert process_state().background().pid == pid
    assert_loads(tmp_path / "b", small_state(2))


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_a_task_is_sent_without_a_free_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(begin(small_state(1), tmp_path / "a"))
    background, send = process_state().background(), BackgroundProcess._send

    def exhausted(self: BackgroundProcess, message: Any, segment: Any = None) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            send(self, message, segment)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    monkeypatch.setattr(BackgroundProcess, "_send", exhausted)
    finish(begin(small_state(2), tmp_path / "b"))
    assert process_state().background() is background
    assert_loads(tmp_path / "b", small_state(2))


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_its_death_is_noticed_though_a_fork_holds_its_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data loader's worker that is forked just then inherits the other ends, which so are never closed."""
    start, held = module._start, list[int]()

    def forking(descriptor: int) -> Any:
        held.append(os.dup(descriptor))
        return start(descriptor)

    monkeypatch.setattr(module, "_start", forking)
    saving = begin({"w": torch.randn(1 << 22)}, f"limited://{tmp_path}", rate=1e6)
    _wait_until(lambda: process_state().background()._started.is_set())
    os.kill(process_state().background().pid, signal.SIGKILL)
    with pytest.raises(errors.CheckpointError, match="for want of memory"):
        finish(saving)
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_signals_to_the_whole_job_do_not_end_it(tmp_path: Path) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    background = process_state().background()
    for number in signals:
        os.kill(background.pid, number)  # before it could ignore anything
    saving = begin(small_state(), tmp_path)
    _wait_until(lambda: background._started.is_set())
    for number in signals:
        os.kill(background.pid, number)
    finish(saving)
    assert process_state().background() is background
    assert_loads(tmp_path, small_state())


@pytest.mark.ci
def test_a_relative_path_leads_where_it_did_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: BackgroundProcess
) -> None:
    (tmp_path / "here").mkdir()
    for number in range(2):  # the state of a second save is copied before its part with DCP begins, too
        monkeypatch.chdir(tmp_path / "here")
        saving = begin(small_state(number), "step")
        monkeypatch.chdir(tmp_path)
        finish(saving)
        assert_loads(tmp_path / "here" / "step", small_state(number))
    assert not (tmp_path / "step").exists()


@pytest.mark.ci
@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_closing_lets_a_save_under_way_go_on(tmp_path: Path, started: BackgroundProcess, delay: float) -> None:
    state = {f"{number}": torch.full((4,), float(number)) for number in range(5000)}
    saving = begin(state, tmp_path)
    time.sleep(delay)
    NvcompWriter(tmp_path).close()
    finish(saving)
    assert_loads(tmp_path, state)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("command", ["/bin/false", "/nonexistent/python"])
def test_without_a_process_the_state_is_saved_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    before = set(multiprocessing.active_children())  # the ranks of other tests
    monkeypatch.setattr(sys, "executable", command)
    for number in range(2):
        finish(begin(small_state(number), tmp_path / str(number)))
        assert_loads(tmp_path / str(number), small_state(number))
    assert "no background process can start" in caplog.text
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_another_installation_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_child, "own_package", lambda: "another version")
    finish(begin(small_state(), tmp_path))
    assert_loads(tmp_path, small_state())
    assert f"another installation, {own_package()}" in caplog.text


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_what_import_ignores_in_its_path_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, None])
    finish(begin(small_state(), tmp_path))
    assert process_state().background().is_usable
    assert_loads(tmp_path, small_state())


@pytest.mark.usefixtures("fresh")
def test_what_cannot_be_heard_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: BackgroundProcess, message: Any) -> None:
        raise ImportError("a class that only the process has")

    monkeypatch.setattr(BackgroundProcess, "_hear", deaf)
    finish(begin(small_state(), tmp_path))  # it never said that it is ready
    assert_loads(tmp_path, small_state())


@pytest.mark.ci
def test_an_interrupt_as_staging_ends_does_not_stop_later_saves(tmp_path: Path) -> None:
    from dcp_nvcomp.saving.asynchronous.staging import Staging

    wait, interrupted = Staging.wait, list[bool]()

    def interrupting(self: Staging) -> BaseException | None:
        found = wait(self)
        if not interrupted:
            interrupted.append(True)
            self._interrupt = KeyboardInterrupt()  # as `wait` does
            raise self._interrupt
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "wait", interrupting)
        with pytest.raises(KeyboardInterrupt):
            begin(small_state(), tmp_path / "0")
        finish(begin(small_state(1), tmp_path / "1"))
    assert_loads(tmp_path / "0", small_state())  # it was staged, so it is what it was
    assert_loads(tmp_path / "1", small_state(1))


class _Making(DefaultSavePlanner):
    """Makes a tensor whenever it is asked for one, and counts how many of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.most = 0
        self._alive = list[Any]()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        import weakref

        self.calls += 1
        value: Any = super().resolve_data(write_item).clone()  # type: ignore[union-attr]
        self._alive = [one for one in self._alive if one() is not None]
        self._alive.append(weakref.ref(value))
        self.most = max(self.most, len(self._alive))
        return value


@pytest.mark.ci
def test_tensors_are_resolved_one_after_the_other(tmp_path: Path, started: BackgroundProcess) -> None:
    state, planner = {str(number): torch.randn(500) for number in range(20)}, _Making()
    finish(begin(state, tmp_path, planner=planner))
    assert planner.most <= 3
    assert planner.calls <= len(state) + 1
    assert_loads(tmp_path, state)


def test_what_does_not_fit_is_not_resolved_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, planner = {str(number): torch.randn(50_000) for number in range(20)}, _Making()
    finish(begin(state, tmp_path, planner=planner, staging_budget_nbytes=1 << 21))
    assert "does not fit into staging_budget_nbytes" in caplog.text
    assert planner.calls <= len(state) + 1
    assert_loads(tmp_path, state)


def test_tensors_that_are_larger_than_planned_are_encoded(tmp_path: Path, started: BackgroundProcess) -> None:
    class Widening(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            return super().resolve_data(write_item).double()  # type: ignore[union-attr]

    state = constant_state(3)
    finish(begin(state, tmp_path, planner=Widening()))
    assert_loads(tmp_path, {name: tensor.double() for name, tensor in state.items()})


def test_settings_of_fsspec_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "limited", {"rate": 1e6})
    settings = storage_of("limited:///tmp/x")
    assert settings.config["limited"] == {"rate": 1e6}
    monkeypatch.delitem(fsspec.config.conf, "limited")
    before = dict(fsspec.config.conf)
    settings.apply()
    assert fsspec.config.conf["limited"] == {"rate": 1e6}
    StorageSettings({}, before).apply()
    assert fsspec.config.conf == before


def test_credentials_that_were_renewed_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "old")
    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("PYTHONPATH", "own")
    wanted = {**os.environ, "TOKEN": "new", "PYTHONPATH": "of training"}
    del wanted["GONE"]
    before = dict(os.environ)
    try:
        background_child._take_environment(wanted)
        assert os.environ["TOKEN"] == "new"
        assert "GONE" not in os.environ
        assert os.environ["PYTHONPATH"] == "own"
        assert os.environ["OMP_NUM_THREADS"] == "1"
    finally:
        os.environ.clear()
        os.environ.update(before)


def _open_files(pid: int) -> list[str]:
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(one))
    return found


@pytest.mark.ci
def test_a_forked_worker_holds_no_copy(tmp_path: Path, started: BackgroundProcess) -> None:
    saving = begin({"w": torch.randn(1 << 22)}, f"limited://{tmp_path}", rate=2e7)
    child = os.fork()
    if not child:
        time.sleep(PATIENCE_SECONDS)
        os._exit(0)
    try:
        assert "memfd:dcp_nvcomp" not in Path(f"/proc/{child}/maps").read_text()
        _wait_until(lambda: not any("memfd:dcp_nvcomp" in name for name in _open_files(child)))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finish(saving)


@pytest.mark.ci
def test_nothing_of_it_stays(started: BackgroundProcess) -> None:
    pid = started.pid
    forget_all()
    _wait_until(lambda: not Path(f"/proc/{pid}").exists())
    _wait_until(lambda: not any(thread.name == "dcp-background" for thread in threading.enumerate()))
