"""Traps that a review found: what a run must not do when something went wrong before, or its caller is careless."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import (
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigurationError,
    Keep,
    RunInUseError,
    StorageError,
    TrainingState,
)
from dcp_nvcomp.runs import list_run, pin_step
from dcp_nvcomp.runs.background import stages
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import damage
from tests.distributed.launch import RankPool
from tests.runs import jobs
from tests.runs.jobs import steps_in
from tests.runs.test_lease import until_lost


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "step": step}


def _manager(path: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(path / "run", run_id="job", preemption_signals=(), **{"every": 10, **options})


def _save(path: Path, *steps: int, **options: Any) -> None:
    with _manager(path, **options) as manager:
        if steps[0] > 10:
            manager.restore(_state(-1))
        for step in steps:
            manager.save(step, _state(step))


def _restored(manager: CheckpointManager, step: int | None = None) -> int:
    state = _state(-1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Step .* is damaged")
        found = manager.restore(state, step)
    assert found is not None and found.step == state["step"]
    assert torch.equal(state["w"], _state(found.step)["w"])
    return found.step


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_fast", [False, True])
def test_a_damaged_step_pushes_no_good_one_out(tmp_path: Path, has_fast: bool) -> None:
    options: dict[str, Any] = {"keep": Keep(last=1)}
    if has_fast:
        options |= {"fast": tmp_path / "fast", "fast_every": 5, "fast_keep": 1}
    _save(tmp_path, 10, 20, **{**options, "keep": None})
    damage(tmp_path / "run" / "step-20")
    if has_fast:
        damage(tmp_path / "fast" / "step-20")
    with _manager(tmp_path, **options) as manager:
        assert _restored(manager) == 10
        manager.save(15, _state(15)).saved.result(60)
    with _manager(tmp_path, **options) as manager:
        assert _restored(manager) == 15
    assert (tmp_path / "run" / "step-20").exists(), "what is damaged stays, to be looked at"


def test_a_damaged_step_of_the_fast_tier_is_not_uploaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fast": tmp_path / "fast", "fast_every": 5, "fast_keep": 3}
    _save(tmp_path, 10, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "upload_files", _fail)
        with pytest.raises(StorageError):
            _save(tmp_path, 20, **options)
    damage(tmp_path / "fast" / "step-20")
    with _manager(tmp_path, **options, keep=Keep(last=1)) as manager:
        assert _restored(manager) == 10
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [10]


def _fail(*_: Any, **__: Any) -> Any:
    raise StorageError("on purpose")


def test_looking_back_and_returning_leaves_nothing_behind(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, 30)
    with _manager(tmp_path, keep=Keep(last=5)) as manager:
        assert _restored(manager, 10) == 10
        assert _restored(manager) == 30
        manager.save(40, _state(40))
    assert steps_in(tmp_path / "run") == [10, 20, 30, 40]


def test_a_job_that_did_not_restore_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20)
    with _manager(tmp_path, keep=Keep(last=2)) as manager:
        with pytest.raises(ConfigurationError, match="Step 10 is not newer than step 20.*call restore first"):
            manager.save(10, _state(10))
        manager.save(30, _state(30))
    assert steps_in(tmp_path / "run") == [20, 30]


def test_a_job_that_did_not_restore_is_refused_what_is_older_in_a_fast_tier(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 1000, "fast": tmp_path / "fast", "fast_every": 50}
    with _manager(tmp_path, **options) as manager:
        for step in (550, 600):
            manager.save(step, _state(step))
    with _manager(tmp_path, **options) as manager:
        with pytest.raises(ConfigurationError, match="Step 50 is not newer than step 600, .* in its fast tier"):
            manager.save(50, _state(50))
        manager.save(650, _state(650))
    (tmp_path / "fast" / "step-650" / ".metadata").unlink()  # a torso, as of a save that died
    with _manager(tmp_path, **options) as manager:
        with pytest.raises(ConfigurationError, match="Step 600 is not newer than step 600"):
            manager.save(600, _state(600))
        assert _restored(manager, 600) == 600
        manager.save(600, _state(600))
        manager.save(610, _state(610))
    with _manager(tmp_path, **options) as manager:
        assert _restored(manager, 600) == 600
        manager.save(605, _state(605))  # which leaves step 610 behind
    with _manager(tmp_path, **options) as manager:
        manager.save(608, _state(608))


def test_the_last_save_before_the_end_is_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = PosixFilesystem.publish

    def slow(filesystem: PosixFilesystem, name: str, data: bytes, **options: Any) -> None:
        if name == ".metadata":
            time.sleep(0.4)
        publish(filesystem, name, data, **options)

    monkeypatch.setattr(PosixFilesystem, "publish", slow)
    with CheckpointManager(tmp_path / "run", every=1, on_backlog="skip") as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
        os.kill(os.getpid(), signal.SIGTERM)
        step = 3
        while not manager.preempted:
            manager.should_save(step)
            step += 1
        manager.save(step, _state(step))
    assert steps_in(tmp_path / "run") == [1, 2, step]


def test_the_last_save_is_uploaded_by_the_next_job_if_this_one_was_too_slow(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fast": tmp_path / "fast", "fast_every": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "upload_files", _fail)
        with pytest.raises(StorageError):
            _be_preempted(tmp_path, 7, **options)
    with _manager(tmp_path, **options, every=100) as manager:
        assert _restored(manager) == 7
    assert steps_in(tmp_path / "run") == [7]


@pytest.mark.parametrize("when", ["save", "wait"])
@pytest.mark.parametrize("asks", [True, False])
def test_a_signal_during_a_save_or_a_wait_leaves_a_durable_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, asks: bool
) -> None:
    """The loop of the documentation: it ends once `preempted` is true, with nothing durable unless a save follows."""
    publish = PosixFilesystem.publish

    def told_meanwhile(filesystem: PosixFilesystem, name: str, data: bytes, **options: Any) -> None:
        if name == ".metadata" and filesystem.path.endswith("fast/step-10"):
            os.kill(os.getpid(), signal.SIGTERM)
        publish(filesystem, name, data, **options)

    monkeypatch.setattr(PosixFilesystem, "publish", told_meanwhile)
    with CheckpointManager(
        tmp_path / "run", every=1000, fast=tmp_path / "fast", fast_every=5, asynchronous=when == "wait"
    ) as manager:
        for step in range(5, 100):
            if manager.should_save(step) if asks else step % 5 == 0:
                manager.save(step, _state(step))
                if when == "wait":
                    manager.wait()
            if manager.preempted:
                break
    assert step < 20 and steps_in(tmp_path / "run") == [step]


def _be_preempted(path: Path, step: int, **options: Any) -> None:
    with CheckpointManager(path / "run", every=100, run_id="job", **options) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        while not manager.should_save(step):
            pass
        manager.save(step, _state(step))


def test_a_pin_that_comes_during_a_removal_counts_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 10, 20, 30, 40)
    publish, pinned = PosixFilesystem.publish, []

    def pin_meanwhile(filesystem: PosixFilesystem, name: str, data: bytes, **options: Any) -> None:
        if name == ".removing" and filesystem.path.endswith("step-10"):
            pin_step(tmp_path / "run", 30)  # long after the pins were listed
        if name == ".removing" and filesystem.path.endswith("step-20"):
            publish(filesystem, name, data, **options)
            try:
                pin_step(tmp_path / "run", 20)
            except CheckpointNotFoundError:
                pinned.append("refused")
            return
        publish(filesystem, name, data, **options)

    monkeypatch.setattr(PosixFilesystem, "publish", pin_meanwhile)
    with _manager(tmp_path, keep=Keep(last=1)) as manager:
        _restored(manager)
        manager.save(50, _state(50))
    assert steps_in(tmp_path / "run") == [30, 50] and pinned == ["refused"]


# --- what is remembered ----------------------------------------------------------------------------------------------


def test_after_a_failed_restore_states_are_saved_whole(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"train": TrainingState(model)}
    with _manager(tmp_path) as manager:
        manager.save(10, state).saved.result(60)
        damage(tmp_path / "run" / "step-10")
        with pytest.raises(CheckpointError), pytest.warns(RuntimeWarning, match="damaged"):
            manager.restore(state)
        manager.save(20, state).saved.result(60)
        restored = manager.restore({"train": TrainingState(torch.nn.Linear(2, 2))})
        assert restored is not None and restored.step == 20


def _momentum(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def _two_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    first, second = model.children()
    return [torch.optim.AdamW(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)]


@pytest.mark.parametrize("optimizers_of", [_momentum, _two_optimizers, lambda m: [torch.optim.AdamW(m.parameters())]])
def test_parameters_without_a_state_are_restored_without_one(
    tmp_path: Path, optimizers_of: Callable[[torch.nn.Module], list[torch.optim.Optimizer]]
) -> None:
    def build() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        return model, optimizers_of(model)

    def step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], *, whole: bool) -> None:
        model.zero_grad()
        inputs = torch.ones(1, 2)
        (model(inputs) if whole else model[0](inputs)).square().sum().backward()  # type: ignore[index,operator]
        for optimizer in optimizers:
            optimizer.step()

    one, other = build(), build()
    step(*one, whole=False)  # the second layer has no gradient yet
    with _manager(tmp_path) as manager:
        manager.save(10, {"train": TrainingState(*one)}).saved.result(60)
        manager.restore({"train": TrainingState(*other)})
    for _ in range(3):
        step(*one, whole=True)
        step(*other, whole=True)
    for left, right in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(left, right)


# --- processes that end ----------------------------------------------------------------------------------------------

UNCLOSED = """
import sys, torch
from dcp_nvcomp import CheckpointManager
manager = CheckpointManager(sys.argv[1], every=1, fast=sys.argv[1] + "-fast", fast_every=1)
manager.save(1, {"w": torch.arange(100000.0)})
raise SystemExit(7)
"""


@pytest.mark.ci
def test_a_manager_that_nobody_closed_lets_the_process_end_and_its_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", UNCLOSED, str(run)], check=False, timeout=120, capture_output=True)
    assert ended.returncode == 7, ended.stderr
    assert [step.step for step in list_run(run).steps] == [1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_ends_by_the_signal_that_the_manager_watches_for(tmp_path: Path) -> None:
    there, here = os.pipe()
    with CheckpointManager(tmp_path) as manager:
        child = os.fork()
        if child == 0:
            os.write(here, b"1")  # while it begins, Python forgets signals
            time.sleep(60)
            os._exit(0)
        assert os.read(there, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not manager.preempted
    os.close(there)
    os.close(here)


def test_closing_may_be_interrupted_and_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = _manager(tmp_path)
    manager.save(10, _state(10))
    with monkeypatch.context() as patch:
        patch.setattr(manager._pipeline, "wait", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    manager.close()
    assert steps_in(tmp_path / "run") == [10]
    with CheckpointManager(tmp_path / "run", run_id="other"):
        pass


def _interrupt() -> None:
    raise KeyboardInterrupt


TOLD_TWICE = """
import os, signal, sys, threading, time, torch
from dcp_nvcomp import CheckpointManager
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
publish = PosixFilesystem.publish

def slow(filesystem, name, data, **options):
    if name == ".metadata":
        is_leaving.wait(60)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)  # of the agent of another node, or a scheduler that repeats it
        time.sleep(0.3)
    publish(filesystem, name, data, **options)

PosixFilesystem.publish, is_leaving = slow, threading.Event()
with CheckpointManager(sys.argv[1], every=1000) as manager:
    os.kill(os.getpid(), signal.SIGTERM)
    while not manager.should_save(7):
        pass
    manager.save(7, {"w": torch.arange(9.0)})
    is_leaving.set()
print("closed", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.ci
def test_a_second_signal_does_not_end_the_process_before_its_last_save_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", TOLD_TWICE, str(run)], check=False, timeout=120, capture_output=True)
    assert ended.stdout == b"closed\n", ended.stderr
    assert steps_in(run) == [7]
    assert ended.returncode == -signal.SIGTERM  # the third one, which is no longer the manager's


def test_signals_are_given_back_once_all_is_saved_and_if_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    meanwhile = []

    def interrupted() -> None:
        meanwhile.append(signal.getsignal(signal.SIGTERM))
        raise KeyboardInterrupt

    manager = CheckpointManager(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(manager._pipeline, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    assert meanwhile != [before] and signal.getsignal(signal.SIGTERM) == before
    manager.close()


@pytest.mark.parametrize("preempted", [False, True])
def test_a_signal_that_comes_while_a_manager_is_closed_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preempted: bool
) -> None:
    """No save follows that would act on it, and the program would go on for as long as it is let.

    But where another rank was told before, the last save was made, and this rank ends as that one does.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        manager = CheckpointManager(tmp_path / "run", preemption_signals=(signal.SIGUSR1,))
        wait = manager._pipeline.wait

        def told() -> None:
            signal.raise_signal(signal.SIGUSR1)
            assert not came
            wait()

        monkeypatch.setattr(manager._pipeline, "wait", told)
        manager._agreement.is_preempted = preempted
        manager.close()
        assert came == ([] if preempted else [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_manager_that_lost_the_run_commits_and_prunes_nothing_more(tmp_path: Path) -> None:
    first = _manager(tmp_path, keep=Keep(last=1), lease_seconds=0.2)
    first.save(10, _state(10)).saved.result(60)
    second = CheckpointManager(tmp_path / "run", every=10, take_over=True, preemption_signals=())
    assert first._durable.lease is not None
    until_lost(first._durable.lease)
    first._has_last_save = False
    with pytest.raises(RunInUseError):
        first.save(20, _state(20))
    with pytest.raises(RunInUseError):
        first._durable.check_lease()
    first.close()
    second.close()
    assert steps_in(tmp_path / "run") == [10]


def test_who_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    with _manager(tmp_path):
        before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        for _ in range(5):
            with pytest.raises(RunInUseError):
                CheckpointManager(tmp_path / "run", run_id="other")
        assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) <= before


# --- several ranks ---------------------------------------------------------------------------------------------------


def _save_without_restore(place: Path, step: int, **options: Any) -> str:
    with jobs.manager_of(place, **options) as manager:
        try:
            manager.save(step, jobs.state_of(step))
        except ConfigurationError as error:
            return str(error)
    return ""


def test_what_one_node_or_several_together_have_refuses_older_steps_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"every": 1000, "fast_every": 50, "copies": 1, "per_node": 1}
    ranks.run(jobs.save_steps, tmp_path, [550, 600], world_size=2, **options)
    (first, second) = ranks.run(_save_without_restore, tmp_path, 50, world_size=2, **options)
    assert first == second and "Step 50 is not newer than step 600" in first
    shutil.rmtree(jobs.fast_of(tmp_path, 0))  # the other node has copies
    found = ranks.run(_save_without_restore, tmp_path, 50, world_size=2, **options)
    assert found == [first, second]
    next((jobs.fast_of(tmp_path, 1) / "step-600").glob("*.distcp")).unlink()  # complete nowhere any more
    (first, second) = ranks.run(_save_without_restore, tmp_path, 50, world_size=2, **options)
    assert first == second and "Step 50 is not newer than step 550" in first


def _one_is_wrong(place: Path, rank: int) -> str:
    import torch.distributed as dist

    with jobs.manager_of(place, every=10, fast_every=10) as manager:
        metrics: Any = {"loss": None} if dist.get_rank() == rank else {"loss": 1.0}
        try:
            manager.save(10, jobs.state_of(10), metrics=metrics)
        except CheckpointError as error:
            message = f"{type(error).__name__}: {error}"
        manager.save(20, jobs.state_of(20))
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [20]
        return message


def test_a_wrong_argument_on_one_rank_fails_the_save_of_all(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_one_is_wrong, tmp_path, 1)
    assert "metrics['loss']=None" in found[1]
    assert all("another rank" in message for message in (found[0], *found[2:]))


def _restore_without_listing(place: Path, node: int, **options: Any) -> dict[str, Any]:
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() // 2 == node:
            patch.setattr(FastTier, "held", _fail)
        return jobs.restore(place, 30, **options)


@pytest.mark.ci
def test_a_node_whose_fast_tier_cannot_be_read_counts_as_empty(ranks: RankPool, tmp_path: Path) -> None:
    options = {"every": 100, "fast_every": 10, "copies": 1}
    ranks.run(jobs.save_steps, tmp_path, [10, 20, 30], **options)
    results = ranks.run(_restore_without_listing, tmp_path, 1, **options)
    assert sum(result.get("peer", 0) for result in results[2:]) > 0
