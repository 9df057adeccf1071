"""CheckpointManager in one process: what it saves, keeps, restores and tells, and how errors reach the caller."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import (
    Best,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigurationError,
    Keep,
    StorageError,
)
from dcp_nvcomp.runs import StepDelayed, StepFailed, StepRestored, StepSaved, StepSkipped, StepsRemoved, list_run
from dcp_nvcomp.runs.events import Event
from tests.checkpoints import assert_loads, damage
from tests.runs.jobs import steps_in


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((20_000,), float(step)), "step": step}


def _run(path: Path, steps: range, **options: Any) -> list[Event]:
    events: list[Event] = []
    with CheckpointManager(path, on_event=events.append, **options) as manager:
        for step in steps:
            if manager.should_save(step):
                manager.save(step, _state(step), metrics={"loss": abs(step - 50.0)})
    return events


def test_it_saves_when_due_keeps_what_the_rule_says_and_tells(tmp_path: Path) -> None:
    events = _run(tmp_path, range(101), every=10, keep=Keep(last=2, best=Best("loss")))
    assert steps_in(tmp_path) == [50, 90, 100]
    assert [event.step for event in events if isinstance(event, StepSaved)] == list(range(10, 101, 10))
    removed = [step for event in events if isinstance(event, StepsRemoved) for step in event.steps]
    assert sorted(removed) == [10, 20, 30, 40, 60, 70, 80]
    assert_loads(tmp_path / "step-50", _state(50))
    assert list_run(tmp_path).steps[0].metrics == {"loss": 0.0}


def test_steps_latest_and_best(tmp_path: Path) -> None:
    _run(tmp_path, range(101), every=10)
    with CheckpointManager(tmp_path) as manager:
        assert [saved.step for saved in manager.steps()] == list(range(10, 101, 10))
        latest, best = manager.latest(), manager.best("loss")
        assert latest is not None and latest.step == 100
        assert best is not None and best.step == 50 and best.metrics == {"loss": 0.0}
        worst = manager.best("loss", "max")
        assert worst is not None and worst.step == 100
        assert manager.best("accuracy") is None


def test_restores_the_newest_or_a_given_step(tmp_path: Path) -> None:
    state = _state(-1)
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(state) is None
        assert manager.latest() is None
    _run(tmp_path, range(31), every=10)
    with CheckpointManager(tmp_path) as manager:
        restored = manager.restore(state)
        assert restored is not None and (restored.step, state["step"]) == (30, 30)
        assert restored.files == {"durable": 1} and restored.metrics == {"loss": 20.0}
        assert torch.equal(state["w"], _state(30)["w"])
        restored = manager.restore(state, step=10)
        assert restored is not None and (restored.step, state["step"]) == (10, 10)
        with pytest.raises(CheckpointNotFoundError, match="step 15"):
            manager.restore(state, step=15)
        assert [one.step for one in manager.report().restored] == [30, 10]


def test_a_damaged_step_is_named_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    _run(tmp_path, range(31), every=10)
    damage(tmp_path / "step-30")
    state = _state(-1)
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(RuntimeWarning, match="Step 30 is damaged"):
            restored = manager.restore(state)
        assert restored is not None and restored.step == 20 and restored.damaged == (30,)
        assert torch.equal(state["w"], _state(20)["w"])
        with pytest.raises(CheckpointError, match="step-30"):
            manager.restore(state, fallback=False)
        with pytest.raises(CheckpointError, match="step-30"):
            manager.restore(state, step=30)


def test_a_state_of_another_shape_is_no_damage(tmp_path: Path) -> None:
    _run(tmp_path, range(21), every=10)
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match="shape"):
        manager.restore({"w": torch.zeros(3), "step": 0})


def test_failed_saves_push_nothing_out_and_are_raised_by_the_next_call(tmp_path: Path) -> None:
    _run(tmp_path, range(21), every=10, keep=Keep(last=2))
    failed = 0
    with CheckpointManager(tmp_path, every=10, keep=Keep(last=2)) as manager:
        for step in range(30, 80, 10):
            blocker = tmp_path / f"step-{step}"
            blocker.write_text("a file where the directory should be")
            saving = manager.save(step, _state(step))
            with pytest.raises(StorageError):
                saving.saved.result(60)
            assert not manager.should_save(step + 1), "told to the other ranks, beside this step"
            with pytest.raises(StorageError):
                manager.should_save(step + 2)
            failed += 1
            blocker.unlink()
        assert manager.report().failed == failed == 5
        assert [saved.step for saved in manager.steps()] == [10, 20]
        manager.save(80, _state(80))
    assert steps_in(tmp_path) == [20, 80]


def test_a_metric_that_no_step_has_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, every=1, keep=Keep(last=2, best=Best("los"))) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, _state(step), metrics={"loss": 1.0})
            manager.wait()
            assert caplog.text.count("No step has the metric 'los'") == (step > 2)


def test_the_error_of_the_loop_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        with CheckpointManager(tmp_path, every=10) as manager:
            (tmp_path / "step-10").write_text("in the way")
            manager.save(10, _state(10))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "A save failed as well" in caplog.text


def test_synchronous_saves_raise_at_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, asynchronous=False) as manager:
        saving = manager.save(1, _state(1))
        assert saving.saved.done() and saving.tiers == ("durable",)
        (tmp_path / "step-2").write_text("in the way")
        with pytest.raises(StorageError):
            manager.save(2, _state(2))
        assert_loads(tmp_path / "step-1", _state(1))


def test_preemption_asks_for_one_last_save(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, every=1000) as manager:
        assert not manager.should_save(1) and not manager.preempted
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.should_save(2), "told to the other ranks, beside this step"
        assert manager.should_save(3) and manager.preempted
        manager.save(3, _state(3))
        assert not manager.should_save(4) and manager.preempted
    assert signal.getsignal(signal.SIGTERM) == before
    assert steps_in(tmp_path) == [3]


def test_off_the_main_thread_signals_are_not_noticed_which_it_says(tmp_path: Path) -> None:
    caught: list[str] = []

    def work() -> None:
        with pytest.warns(RuntimeWarning, match="main thread") as warned:
            CheckpointManager(tmp_path).close()
        caught.extend(str(one.message) for one in warned)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_the_last_step_of_a_removal_and_of_a_restore_are_told(tmp_path: Path) -> None:
    _run(tmp_path, range(11), every=10)
    events: list[Event] = []
    with CheckpointManager(tmp_path, on_event=events.append) as manager:
        manager.restore(_state(-1))
    (restored,) = events
    assert isinstance(restored, StepRestored) and "restored step 10" in str(restored)
    failed = StepFailed(3, ("fast",), "StorageError: full")
    assert str(failed) == "step 3 could not be saved: StorageError: full, but it is in these tiers: fast"
    assert str(StepsRemoved((1, 2), "durable")) == "removed from the durable tier: 1, 2"


def test_an_event_handler_that_raises_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError("on purpose")

    with CheckpointManager(tmp_path, on_event=fail) as manager:
        manager.save(1, _state(1))
    assert "ZeroDivisionError" in caplog.text
    assert steps_in(tmp_path) == [1]


def test_too_little_room_in_the_fast_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    fast = tmp_path / "fast"
    options: dict[str, Any] = {"every": 1000, "fast": fast, "fast_every": 1, "on_event": events.append}
    with CheckpointManager(tmp_path / "run", **options) as manager:
        manager.save(1, _state(1)).saved.result(60)
        assert manager._fast is not None
        monkeypatch.setattr(manager._fast, "free_nbytes", lambda: 0)
        with caplog.at_level(logging.WARNING):
            manager.save(2, _state(2)).saved.result(60)
            manager.save(3, _state(3)).saved.result(60)
    assert steps_in(tmp_path / "run") == [2, 3]
    assert not list(fast.glob("step-*")), "step 1 made room once step 2 was in the durable tier"
    assert "step 1 went: it is not newer" in caplog.text
    assert caplog.text.count("until that changes") == 1, "said once"
    assert sum(isinstance(event, StepSkipped) for event in events) == 2


def test_what_a_save_has_not_written_yet_is_no_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcp_nvcomp.storage.local.filesystem import PosixFilesystem

    go, open_output = threading.Event(), PosixFilesystem.open_output

    def slow(filesystem: PosixFilesystem, name: str) -> Any:
        if "fast/step-2" in filesystem.path:
            go.wait(60)
        return open_output(filesystem, name)

    with CheckpointManager(tmp_path / "run", every=1000, fast=tmp_path / "fast", fast_every=1) as manager:
        manager.save(1, _state(1)).saved.result(60)
        assert manager._fast is not None
        step_nbytes = sum(file.stat().st_size for file in (tmp_path / "fast" / "step-1").glob("*.distcp"))
        monkeypatch.setattr(manager._fast, "free_nbytes", lambda: int(1.5 * step_nbytes))
        monkeypatch.setattr(PosixFilesystem, "open_output", slow)
        second = manager.save(2, _state(2))
        third = manager.save(3, _state(3))
        go.set()
        assert second.saved.result(60).tiers == ("fast",)
        assert third.saved.result(60).tiers == ("durable",)


def test_room_is_taken_before_a_save_writes_any_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there by then is an earlier save's."""
    from dcp_nvcomp.runs.background import pipeline
    from dcp_nvcomp.runs.tiers.fast import Room

    begin, begun, there = pipeline.async_save, Room.begun, list[int]()

    def written_at_once(*given: Any, **options: Any) -> Any:
        saving = begin(*given, **options)
        saving.upload_completion.wait()
        return saving

    def noted(self: Room, step: int, nbytes: float = 0) -> None:
        there.append(self._nbytes_of(step))
        begun(self, step, nbytes)

    monkeypatch.setattr(pipeline, "async_save", written_at_once)
    monkeypatch.setattr(Room, "begun", noted)
    with CheckpointManager(tmp_path / "run", every=1000, fast=tmp_path / "fast", fast_every=1) as manager:
        for step in (1, 2):
            manager.save(step, _state(step)).saved.result(60)
    assert there == [0, 0]


class _SlowStorage:
    """Makes publishing wait until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from dcp_nvcomp.storage.local.filesystem import PosixFilesystem

        self.go = threading.Event()
        publish = PosixFilesystem.publish

        def slow(filesystem: PosixFilesystem, name: str, data: bytes, **options: Any) -> None:
            if name == ".metadata" and "/run/" in filesystem.path:
                self.go.wait(60)
            publish(filesystem, name, data, **options)

        monkeypatch.setattr(PosixFilesystem, "publish", slow)


def test_a_larger_limit_of_metadata_counts_for_the_fast_tier_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"every": 1000, "fast": tmp_path / "fast", "fast_every": 10, "run_id": "job"}
    with CheckpointManager(tmp_path / "run", **options) as manager:
        manager.save(10, _state(10))
    monkeypatch.setattr("dcp_nvcomp.runs.options.MAX_METADATA_NBYTES", 10)  # as if that were large
    for limit, found in (({}, None), ({"metadata_limit_nbytes": 1 << 20}, 10)):
        with CheckpointManager(tmp_path / "run", **options, **limit) as manager:
            event = manager.restore(_state(0))
        assert (None if event is None else event.step) == found


@pytest.mark.parametrize("has_fast", [False, True])
def test_skip_leaves_out_what_storage_is_too_slow_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fast: bool
) -> None:
    """It goes to the fast tier only, if there is one."""
    storage = _SlowStorage(monkeypatch)
    options: dict[str, Any] = {"fast": tmp_path / "fast", "fast_every": 1} if has_fast else {}
    with CheckpointManager(tmp_path / "run", every=1, on_backlog="skip", **options) as manager:
        saves = [manager.save(step, _state(step)) for step in (1, 2, 3)]
        assert has_fast or isinstance(saves[2].saved.result(0), StepSkipped)
        storage.go.set()
        manager.wait()
        tiers = ("fast", "durable") if has_fast else ("durable",)
        assert [save.tiers for save in saves] == [tiers, tiers, ("fast",) if has_fast else ()]
        manager.save(4, _state(4))
    assert steps_in(tmp_path / "run") == [1, 2, 4]


@pytest.mark.ci
def test_what_training_ends_with_is_durable_and_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"fast": tmp_path / "fast", "fast_every": 1, "on_backlog": "skip"}
    with CheckpointManager(tmp_path / "run", every=2, **options) as manager:
        assert manager.save(7, _state(7), durable=True).saved.result(60).tiers == ("fast", "durable")  # type: ignore[union-attr]
        storage = _SlowStorage(monkeypatch)
        for step in (8, 10):
            manager.save(step, _state(step))
        threading.Timer(0.3, storage.go.set).start()
        manager.save(11, _state(11), durable=True)
    assert steps_in(tmp_path / "run") == [7, 8, 10, 11]
    with CheckpointManager(tmp_path / "run", every=2) as manager, pytest.raises(ConfigurationError, match="durable="):
        manager.save(12, _state(12), durable="yes")  # type: ignore[arg-type]


def test_wait_holds_training_back_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _SlowStorage(monkeypatch)
    events: list[Event] = []
    with CheckpointManager(tmp_path / "run", every=1, on_event=events.append) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
        threading.Timer(0.3, storage.go.set).start()
        manager.save(3, _state(3))
    assert steps_in(tmp_path / "run") == [1, 2, 3]
    (delayed,) = [event for event in events if isinstance(event, StepDelayed)]
    assert delayed.step == 3 and delayed.seconds > 0.1


def test_steps_on_their_way_stay_in_the_fast_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _SlowStorage(monkeypatch)
    fast = tmp_path / "fast"
    with CheckpointManager(tmp_path / "run", every=2, fast=fast, fast_every=1, fast_keep=1) as manager:
        for step in (2, 3, 5):
            manager.save(step, _state(step))
            while manager._pipeline._fast_thread.waiting:  # type: ignore[union-attr]
                time.sleep(0.01)
        assert sorted(path.name for path in fast.glob("step-*")) == ["step-2", "step-5"]
        storage.go.set()
    assert steps_in(tmp_path / "run") == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"fast_every": 10}, "fast="),
        ({"copies": 1}, "fast="),
        ({"fast": "s3://bucket/x"}, "directory of each node"),
        ({"fast": "/dev/shm/x", "copies": -1}, "copies=-1"),
        ({"fast": "/dev/shm/x", "fast_keep": 0}, "fast_keep=0"),
        ({"keep": 3}, "keep=3"),
        ({"on_backlog": "drop"}, "on_backlog='drop'"),
        ({"step_template": "step"}, "step_template"),
        ({"step_template": "a/{step}"}, "step_template"),
        ({"lease_seconds": 0}, "lease_seconds=0"),
        ({"codec": "zip"}, "zip"),
        ({"interval": 10}, "interval"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CheckpointManager(tmp_path, **options)
    assert not (tmp_path / ".run").exists()


@pytest.mark.parametrize(
    ("step", "metrics", "words"),
    [
        (-1, None, "step=-1"),
        (10**30, None, "larger than any step"),
        (1, {"loss": "low"}, "not a number"),
        (1, {"loss": torch.zeros(2)}, "not a number"),
        (1, {f"metric {number}": 1 / 3 for number in range(500)}, "too many"),
    ],
)
def test_mistakes_in_a_save_are_named(tmp_path: Path, step: int, metrics: Any, words: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ConfigurationError, match=words):
            manager.save(step, _state(1), metrics=metrics)
        manager.save(2, _state(2), metrics={"loss": torch.tensor(0.5, requires_grad=True), "nan": math.nan})
    assert list_run(tmp_path).steps[0].metrics["loss"] == 0.5


def test_a_closed_manager_says_so(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(ConfigurationError, match="closed"):
        manager.save(1, _state(1))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    _run(tmp_path, range(21), every=10, fast=tmp_path / "fast", fast_every=10)
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert set(left) <= {"dcp-background"}, left  # of the background process, which serves later saves too
