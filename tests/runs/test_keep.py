"""Which steps of a run are kept: rules against a model over runs of 10,000 steps."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, Keep
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.runs.restoring.candidates import candidates
from dcp_nvcomp.runs.retention import Best, SavedStep, reasons_to_keep, what_goes
from tests.effort import THOROUGH


def run(count: int, *, apart: int = 10, losses: Sequence[float] | None = None) -> list[SavedStep]:
    losses = losses or [1.0 / (number + 1) for number in range(count)]
    return [SavedStep(number * apart, 60.0 * number, {"loss": losses[number]}) for number in range(count)]


class Model:
    """What Keep means, one question a step and rule."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep

    def keeps(self, step: SavedStep, steps: Sequence[SavedStep]) -> bool:
        later = sum(other.step > step.step for other in steps)
        if later < self.keep.last:
            return True
        if self.keep.every is not None and step.step % self.keep.every == 0:
            return True
        if self.keep.newer_than is not None:
            assert isinstance(self.keep.newer_than, timedelta)
            newest = max(other.saved_seconds for other in steps)
            if newest - step.saved_seconds < self.keep.newer_than.total_seconds():
                return True
        if self.keep.best is not None:
            assert isinstance(self.keep.best, Best)
            value = step.metrics.get(self.keep.best.metric, math.nan)
            better = 0
            for other in steps:
                theirs = other.metrics.get(self.keep.best.metric, math.nan)
                ahead = theirs < value if self.keep.best.mode == "min" else theirs > value
                better += ahead or (theirs == value and other.step > step.step)
            if not math.isnan(value) and better < self.keep.best.count:
                return True
        return step.step in self.keep.milestones


def drawn(random_: random.Random) -> Keep:
    some = random_.random
    return Keep(
        last=random_.randint(1, 5),
        every=random_.choice((None, 500, 2000)),
        newer_than=timedelta(minutes=random_.randint(1, 20)) if some() < 0.5 else None,
        best=Best("loss", random_.choice(("min", "max")), random_.randint(1, 3)) if some() < 0.5 else None,
        milestones=tuple(random_.choices(range(0, 100_000, 10), k=random_.randint(0, 5))),
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_run_of_10_000_steps_keeps_what_the_model_keeps(seed: int) -> None:
    random_ = random.Random(seed)
    keep = drawn(random_)
    model, kept, compared = Model(keep), [], 0
    for number in range(10_000):
        metrics = {"loss": random_.choice((math.nan, 1.0, 2.0, random_.random()))} if random_.random() < 0.9 else {}
        kept.append(SavedStep(number * 10, number * 60.0, metrics))
        remaining = set(reasons_to_keep(keep, kept))
        if number % (7 if THOROUGH else 101) == 0:
            compared += 1
            assert remaining == {step.step for step in kept if model.keeps(step, kept)}
        kept = [step for step in kept if step.step in remaining]
        assert kept[-1].step == number * 10
    assert compared > 50


def test_reasons_say_which_rules_speak_for_a_step() -> None:
    keep = Keep(last=1, every=50, best=(Best("loss", "max", 1), Best("loss", "min", 1)), milestones={20})
    assert keep.reasons(run(10)) == {
        0: ("every 50", "best loss"),
        20: ("milestone",),
        50: ("every 50",),
        90: ("last 1", "best loss"),
    }


def test_a_callable_decides_but_for_the_newest() -> None:
    def odd(steps: Sequence[SavedStep]) -> Collection[int]:
        return [step.step for step in steps if step.step % 20 and step.step < 90]

    assert reasons_to_keep(odd, run(10)) == {
        10: ("rule",),
        30: ("rule",),
        50: ("rule",),
        70: ("rule",),
        90: ("newest",),
    }


def test_what_is_pinned_stays_whatever_a_rule_says() -> None:
    doomed = what_goes(Keep(last=1), run(3), (), lambda: {run(3)[0].step})
    assert doomed.steps == (run(3)[1].step,)
    assert doomed.kept[run(3)[0].step] == ("pinned",)


def test_no_rule_keeps_all() -> None:
    assert set(reasons_to_keep(None, run(10))) == {step.step for step in run(10)}
    assert reasons_to_keep(Keep(), []) == {}


def test_which_steps_are_the_best_and_which_are_new() -> None:
    steps = [SavedStep(1, 0.0, {"loss": math.nan}), SavedStep(2, 0.0), SavedStep(3, 0.0, {"loss": 5.0})]
    assert Best("loss", "min", 3).of(steps) == [3], "NaN and missing metrics never are"
    assert Best("loss", "min", 2).of(run(4, losses=[1.0, 1.0, 2.0, 1.0])) == [30, 10], "of equal values the later step"
    assert set(Keep(newer_than=120.0)(run(10))) == {80, 90}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Keep, {"last": 0}, "last=0"),
        (Keep, {"last": True}, "last=True"),
        (Keep, {"every": -1}, "every=-1"),
        (Keep, {"newer_than": 0}, "newer_than=0"),
        (Keep, {"newer_than": "1 day"}, "newer_than='1 day'"),
        (Keep, {"best": "loss"}, "best='loss'"),
        (Keep, {"milestones": [1.5]}, "milestones"),
        (Keep, {"milestones": "100"}, "milestones"),
        (Best, {"metric": ""}, "Best"),
        (Best, {"metric": "loss", "mode": "least"}, "Best"),
        (Best, {"metric": "loss", "count": 0}, "Best"),
    ],
)
def test_mistakes_are_named(kind: Any, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        kind(**options)


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
