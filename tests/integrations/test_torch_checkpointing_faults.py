"""torch_checkpointing's storage: kills and errors at each call of a save and its commit."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import CheckpointError
from tests.effort import sampled
from tests.faults.disk_model import Recorder, crash_states, make_tree, read_tree
from tests.faults.intercept import WRITING, Counted, Fault, FaultyCalls, intercept_system_calls
from tests.integrations.launch import needs
from tests.integrations.torch_checkpointing_storage import commit, get, state, storage_of
from tests.states import assert_same


@pytest.fixture(autouse=True)
def torch_checkpointing() -> None:
    needs("torch_checkpointing", "torch-checkpointing==0.1.1")


class Killing(Counted):
    """A hook under which the process kills itself at one call."""

    def __init__(self, fatal: int) -> None:
        super().__init__()
        self._fatal = fatal

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if at == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)


def commit_until_killed(path: str, at: int) -> None:
    """Do what a rank that writes does, up to a call."""
    intercept_system_calls(setattr, Killing(at))
    commit(storage_of((path, {})), seed=1)


def check_after_failure(path: Path, where: str) -> bool:
    """Check that what was committed before is there, and the new checkpoint wholly or not at all."""
    reader = storage_of((str(path), {}))
    assert_same(get(reader, "old/model_0.pt"), state(7))
    is_there: bool = reader.exists(Path("step-1"))
    if is_there:
        for rank in range(2):
            assert_same(get(reader, f"step-1/model_{rank}.pt"), state(1 + rank))
    else:  # and a save goes on from there
        commit(storage_of((str(path), {})), seed=3)
        assert_same(get(storage_of((str(path), {})), "step-1/model_0.pt"), state(3))
        assert len(list((path / "step-1").iterdir())) == 2, where
    return is_there


def calls_of_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the calls that writing and committing a checkpoint makes."""
    calls = Counted()
    with monkeypatch.context() as patch:
        intercept_system_calls(patch.setattr, calls)
        commit(storage_of((str(path), {})), seed=1)
    return calls.names


@pytest.mark.ci
def test_killed_at_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = calls_of_a_commit(tmp_path / "count", monkeypatch)
    commit(storage_of((str(tmp_path / "old"), {})), "old", seed=7)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", __name__])
    found = []
    for at in sampled(range(len(names)), 6):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", path)
        child = context.Process(target=commit_until_killed, args=(str(path), at))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, f"call {at}, {names[at]}"
        found.append(check_after_failure(path, f"killed at call {at}, {names[at]}"))
        shutil.rmtree(path)
    assert found == sorted(found) and set(found) == {False, True}, "from the commit on it is there"


@pytest.mark.ci
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC from then on"])
def test_each_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    names = calls_of_a_commit(tmp_path / "count", monkeypatch)
    commit(storage_of((str(tmp_path / "old"), {})), "old", seed=7)
    lasting = WRITING if number == errno.ENOSPC else frozenset()
    for at in sampled(range(len(names)), 3):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", path)
        failed = False
        with monkeypatch.context() as patch:
            intercept_system_calls(patch.setattr, FaultyCalls(Fault(at, number, lasting=lasting)))
            try:
                commit(storage_of((str(path), {})), seed=1)
            except (CheckpointError, AssertionError):  # or a storage that does not see what it should
                failed = True
        is_there = check_after_failure(path, f"call {at}, {names[at]}")
        assert failed or is_there, f"call {at}, {names[at]}: a save that did not work succeeded"
        shutil.rmtree(path)


@pytest.mark.ci
def test_the_power_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library syncs nothing itself, so what is durable is what this storage makes so."""
    disk = tmp_path / "disk"
    commit(storage_of((str(disk), {})), "old", seed=7)
    before, recorder = read_tree(disk), Recorder(disk)
    with monkeypatch.context() as patch:
        intercept_system_calls(patch.setattr, recorder)
        commit(storage_of((str(disk), {})), seed=1)
    found = {False: 0, True: 0}
    for taken, tree in sampled(list(crash_states(before, recorder.steps)), 3):
        make_tree(tmp_path / "after", tree)
        reader = storage_of((str(tmp_path / "after"), {}))
        where = f"after {taken} of {len(recorder.steps)} steps, the last of them {recorder.steps[max(taken - 1, 0)]}"
        assert_same(get(reader, "old/model_0.pt"), state(7))
        is_there = reader.exists(Path("step-1"))
        if is_there:
            for rank in range(2):
                assert_same(get(reader, f"step-1/model_{rank}.pt"), state(1 + rank))
            assert reader.read(Path("step-1/parts/config.json")) == b'{"a": 1}'
        assert is_there or taken < len(recorder.steps), f"what was committed is not there {where}"
        found[is_there] += 1
    assert all(found.values())
