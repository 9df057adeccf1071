"""No rule of a run depends on clocks that agree, or that only go forward."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, Keep
from dcp_nvcomp.runs.keep import SavedStep
from dcp_nvcomp.runs.restoring.candidates import candidates

YEAR = 365 * 86400.0


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step))}


def _step(step: int, saved_seconds: float, run_seconds: float | None = None, **options: Any) -> SavedStep:
    return SavedStep(step, saved_seconds, run_seconds=run_seconds, **options)


def test_a_step_of_a_clock_that_was_ahead_makes_no_other_old() -> None:
    hour = Keep(newer_than=timedelta(hours=1))
    assert set(hour([_step(1, 0.0), _step(2, YEAR), _step(3, 60.0), _step(4, 120.0)])) == {1, 2, 3, 4}
    assert set(hour([_step(1, 0.0), _step(2, YEAR), _step(3, 7200.0)])) == {2, 3}


def test_the_time_of_the_run_counts_and_not_the_clock() -> None:
    minute = Keep(newer_than=60.0)
    steps = [_step(1, YEAR, 0.0), _step(2, 0.0, 50.0), _step(3, 2 * YEAR, 100.0)]
    assert set(minute(steps)) == {2, 3}
    assert set(minute([_step(1, 0.0), *steps[1:]])) == {2, 3}, "of a step that does not say it the clock counts"


def test_the_time_of_a_run_goes_on_from_job_to_job_and_no_clock_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for step, clock in ((1, now + YEAR), (2, now - YEAR), (3, now)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        with CheckpointManager(tmp_path, every=1, keep=Keep(newer_than=3600.0), run_id="job") as manager:
            restored = manager.restore(_state(0))
            assert (restored is None) == (step == 1)
            manager.save(step, _state(step))
        os.utime(tmp_path / f"step-{step}" / ".metadata", (clock, clock))
    monkeypatch.undo()
    with CheckpointManager(tmp_path, every=1, keep=Keep(newer_than=3600.0), run_id="job") as manager:
        manager.save(4, _state(4))  # did not restore
        manager.wait()
        steps = manager.steps()
    assert [saved.step for saved in steps] == [1, 2, 3, 4]
    times = [saved.run_seconds for saved in steps]
    assert None not in times and times == sorted(times, key=float) and times[-1] < 600  # type: ignore[arg-type,operator]
    assert len(set(times)) == 4
    assert [saved.lease for saved in steps] == [1, 2, 3, 4]


def test_who_goes_back_goes_on_from_the_time_of_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1_000_000, 1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    with CheckpointManager(tmp_path, every=1, run_id="job") as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
        manager.wait()
        first, _, last = (saved.run_seconds for saved in manager.steps())
        assert first is not None and last is not None and first < last
        manager.restore(_state(0), 1)
        manager.save(2, _state(2))
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [1, 2]
        again = manager.steps()[1].run_seconds
    assert again is not None and first < again


@pytest.mark.parametrize("ahead", [-YEAR, YEAR])
def test_which_save_of_a_step_is_the_latest_goes_by_the_leases(ahead: float) -> None:
    earlier = _step(5, 0.0, 100.0, save_id="a", lease=1)
    later = _step(5, ahead, 90.0, save_id="b", lease=2)
    assert [one.save_id for one in candidates([earlier, later], [])] == ["b", "a"]
    again = _step(5, ahead, 110.0, save_id="c", lease=2)
    assert [one.save_id for one in candidates([later, again, earlier], [])] == ["c", "b", "a"]
