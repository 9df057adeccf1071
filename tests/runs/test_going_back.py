"""A run that goes back to an earlier step on purpose and saves from there leaves the newer ones behind."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, ConfigurationError, Keep, StorageError, load
from dcp_nvcomp.runs import SavedStep, list_run, pin_step
from dcp_nvcomp.runs.own_files import Abandoned, read_kept
from dcp_nvcomp.runs.restoring.candidates import candidates
from dcp_nvcomp.runs.restoring.restore import Restoring
from dcp_nvcomp.runs.tiers.fast import HeldStep
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.distributed.launch import RankPool
from tests.runs import jobs


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value)}


def _save(path: Path, values: dict[int, float], *, back_to: int | None = None, **options: Any) -> list[int]:
    """Save steps, perhaps after going back; return the complete ones."""
    with CheckpointManager(path, **{"every": 1, "run_id": "job", **options}) as manager:
        if back_to is not None:
            restored = manager.restore(_state(-1.0), back_to)
            assert restored is not None and restored.step == back_to
        for step, value in values.items():
            manager.save(step, _state(value))
        manager.wait()
        return [saved.step for saved in manager.steps()]


def _newest(path: Path, **options: Any) -> tuple[int, float]:
    state = _state(-1.0)
    with CheckpointManager(path, run_id="job", **options) as manager:
        restored = manager.restore(state)
        assert restored is not None
        return restored.step, float(state["w"][0])


@pytest.mark.parametrize("has_fast", [False, True])
def test_what_was_left_behind_is_not_restored_nor_counted(tmp_path: Path, has_fast: bool) -> None:
    options: dict[str, Any] = {"fast": tmp_path / "fast", "fast_every": 1} if has_fast else {}
    run = tmp_path / "run"
    _save(run, {step: float(step) for step in (10, 20, 30, 40)}, **options)
    assert _save(run, {22: 2.2, 24: 2.4}, back_to=20, **options) == [10, 20, 22, 24]
    assert _newest(run, **options) == (24, pytest.approx(2.4))
    state = _state(-1.0)
    load(state, run / "step-40", no_dist=True)
    assert state["w"][0] == 40, "without a rule nothing goes"
    assert _save(run, {30: 3.0}, **options) == [10, 20, 22, 24, 30], "saved again, it is of the run"
    assert _newest(run, **options) == (30, 3.0)


def test_a_rule_keeps_what_is_saved_now_and_not_what_was_left_behind(tmp_path: Path) -> None:
    _save(tmp_path, {step: float(step) for step in (10, 20, 30, 40)})
    pin_step(tmp_path, 30)
    assert _save(tmp_path, {22: 2.2, 24: 2.4}, back_to=20, keep=Keep(last=2)) == [22, 24]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-22", "step-24", "step-30"]


def test_a_restore_alone_leaves_nothing_behind_and_one_can_go_forward_again(tmp_path: Path) -> None:
    _save(tmp_path, {10: 1.0, 20: 2.0, 30: 3.0})
    _save(tmp_path, {}, back_to=10)
    assert _newest(tmp_path) == (30, 3.0)
    _save(tmp_path, {15: 1.5}, back_to=10)
    assert _save(tmp_path, {25: 2.5}, back_to=20) == [10, 15, 20, 25]
    assert _newest(tmp_path) == (25, 2.5)


def test_if_what_says_so_is_damaged_nothing_is_guessed(tmp_path: Path) -> None:
    _save(tmp_path, {10: 1.0, 20: 2.0})
    _save(tmp_path, {15: 1.5}, back_to=10)
    (tmp_path / ".run" / "abandoned").write_bytes(b"{")
    with pytest.raises(StorageError, match="damaged"):
        _newest(tmp_path)


def _unreadable(monkeypatch: pytest.MonkeyPatch, broken: set[str]) -> None:
    def read(call: Any) -> Any:
        def broken_or_not(filesystem: PosixFilesystem, name: str, *rest: Any, **more: Any) -> Any:
            if name in broken:
                raise StorageError("the disk is broken", path=filesystem.location(name), errno=errno.EIO)
            return call(filesystem, name, *rest, **more)

        return broken_or_not

    for name in ("read", "read_all", "read_into"):
        monkeypatch.setattr(PosixFilesystem, name, read(getattr(PosixFilesystem, name)))


def test_a_step_that_may_be_left_behind_is_not_guessed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `.metadata` can't be read while the run is listed, and can be a moment later."""
    _save(tmp_path, {10: 1.0, 20: 2.0})
    _save(tmp_path, {15: 1.5}, back_to=10)
    (tmp_path / ".run" / "seen").unlink()
    broken = {"step-20/.metadata"}
    _unreadable(monkeypatch, broken)
    with pytest.raises(StorageError, match="the disk is broken"):
        _newest(tmp_path)
    broken.clear()
    assert _newest(tmp_path) == (15, pytest.approx(1.5))
    (tmp_path / ".run" / "abandoned").unlink()
    broken.add("step-20/.metadata")
    assert [step.state for step in list_run(tmp_path).steps] == ["complete", "complete", "damaged"]


def test_such_a_step_harms_nothing_but_a_restore_that_comes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, {10: 1.0, 20: 2.0, 30: 3.0})
    _save(tmp_path, {15: 1.5}, back_to=10)
    (tmp_path / ".run" / "seen").unlink()
    _unreadable(monkeypatch, {"step-20/.metadata"})
    with CheckpointManager(tmp_path, every=1, run_id="job", keep=Keep(last=2)) as manager:
        state = _state(-1.0)
        restored = manager.restore(state, 15)
        assert restored is not None and state["w"][0] == 1.5
        manager.save(25, _state(2.5))
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [15, 25]
    with CheckpointManager(tmp_path, run_id="job") as manager:
        restored = manager.restore(state)
        assert restored is not None and restored.step == 25, "which is newer than what can't be read"


def test_what_could_not_be_left_behind_is_by_the_next_save(tmp_path: Path) -> None:
    _save(tmp_path, {100: 1.0, 500: 5.0})
    with CheckpointManager(tmp_path, every=1, run_id="job") as manager:
        manager.restore(_state(-1.0), 100)
        (tmp_path / ".run" / "abandoned").mkdir()  # no file can be published there
        with pytest.raises(StorageError):
            manager.save(101, _state(1.1))
        (tmp_path / ".run" / "abandoned").rmdir()
        manager.save(101, _state(1.1))
    assert _newest(tmp_path) == (101, pytest.approx(1.1))


@pytest.mark.parametrize("has_fast", [False, True])
def test_steps_only_grow_unless_one_goes_back(tmp_path: Path, has_fast: bool) -> None:
    options: dict[str, Any] = {"fast": tmp_path / "fast", "fast_every": 1, "fast_keep": 1} if has_fast else {}
    run = tmp_path / "run"
    _save(run, {90: 9.0, 100: 10.0}, keep=Keep(last=2), **options)
    with CheckpointManager(run, every=1, run_id="job", keep=Keep(last=2), **options) as manager:
        manager.restore(_state(-1.0))
        with pytest.raises(ConfigurationError, match="Step 10 is older than step 100"):
            manager.save(10, _state(1.0))
        manager.save(100, _state(10.5))  # what it restored may be replaced
        manager.save(110, _state(11.0))
        with pytest.raises(ConfigurationError, match="Step 105 is older than step 110"):
            manager.save(105, _state(1.0))
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [100, 110]
        manager.restore(_state(-1.0), 100)
        manager.save(105, _state(10.6))
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [100, 105]
    assert _newest(run, **options) == (105, pytest.approx(10.6))


def _save_older(place: Path) -> str:
    with jobs.manager_of(place) as manager:
        manager.restore(jobs.state_of(-1))
        with pytest.raises(ConfigurationError) as refused:
            manager.save(10, jobs.state_of(10))
        manager.save(30, jobs.state_of(30))
    return str(refused.value)


def test_all_ranks_are_refused_alike(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, [10, 20], world_size=2)
    first, second = ranks.run(_save_older, tmp_path, world_size=2)
    assert first == second and "Step 10 is older than step 20" in first


def _go_back(place: Path, back_to: int, steps: list[int], **options: Any) -> None:
    state = jobs.state_of(-1)
    with jobs.manager_of(place, **options) as manager:
        manager.restore(state, back_to)
        jobs.assert_state_of(back_to, state)
        for step in steps:
            manager.save(step, jobs.state_of(step))


@pytest.mark.ci
def test_on_several_nodes(ranks: RankPool, tmp_path: Path) -> None:
    options = {"every": 20, "fast_every": 10, "copies": 1, "fast_keep": 3}
    ranks.run(jobs.save_steps, tmp_path, [10, 20, 30, 40, 50], **options)
    ranks.run(_go_back, tmp_path, 30, [35], **options)
    ranks.run(jobs.restore, tmp_path, 35, **options)
    for node in (0, 1):
        assert sorted(path.name for path in jobs.fast_of(tmp_path, node).glob("step-*")) == ["step-30", "step-35"]


def _fast(fast: Path) -> dict[str, Any]:
    return {"fast": fast, "fast_every": 1, "fast_keep": 4, "every": 10}


def test_a_step_that_was_left_behind_is_so_beside_another_save_of_it(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    _save(run, {10: 1.0, 16: 1.6})
    _save(run, {12: 2.2, 16: 2.6}, back_to=10, **_fast(fast))
    assert _newest(run, **_fast(fast)) == (16, pytest.approx(2.6))
    with CheckpointManager(run, run_id="job", keep=Keep(last=2), **_fast(fast)) as manager:
        assert manager.restore(_state(-1.0)) is not None
        manager.save(20, _state(2.0))
    assert sorted(path.name for path in run.glob("step-*")) == ["step-10", "step-20"]


def test_what_was_left_behind_does_not_come_back_where_the_fast_tier_is_lost(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    _save(run, {10: 1.0, 16: 1.6})
    _save(run, {12: 2.2, 16: 2.6}, back_to=10, **_fast(fast))
    with CheckpointManager(run, run_id="job", **_fast(fast)) as manager:
        assert manager.restore(_state(-1.0)) is not None
        manager.save(17, _state(2.7))
    shutil.rmtree(fast)
    assert _newest(run, **_fast(fast)) == (10, 1.0)


def test_what_a_node_that_was_away_brings_back_stays_behind(tmp_path: Path) -> None:
    run, fast, away = tmp_path / "run", tmp_path / "fast", tmp_path / "away"
    _save(run, {10: 1.0, 16: 1.6}, **_fast(fast))
    shutil.copytree(fast, away)
    _save(run, {12: 2.2}, back_to=10, **_fast(fast))  # 16 is left behind, of which the fast tier loses its files
    _save(run, {11: 3.1}, back_to=10, **_fast(fast))
    assert _newest(run, **_fast(away)) == (10, 1.0)


def test_a_newer_save_beside_one_that_was_left_behind_is_left_behind_too(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    _save(run, {10: 1.0, 16: 1.6})
    _save(run, {12: 2.2, 16: 2.6}, back_to=10, **_fast(fast))
    _save(run, {13: 3.3}, back_to=12, **_fast(fast))
    assert _newest(run, **_fast(fast)) == (13, pytest.approx(3.3))


def test_what_was_saved_again_since_stays_in_the_fast_tier(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    options = {**_fast(fast), "fast_keep": 9}
    _save(run, {step: float(step) for step in range(10, 17)}, **options)
    _save(run, {step: step + 0.5 for step in range(11, 17)}, back_to=10, **options)
    _save(run, {15: 15.7}, back_to=14, **options)
    assert sorted(path.name for path in fast.glob("step-*")) == [f"step-{step}" for step in range(10, 16)]
    for step in (14, 15):
        shutil.rmtree(fast / f"step-{step}")
    assert _newest(run, **options) == (13, 13.5)


def test_what_people_are_told_of_steps_that_were_saved_again(tmp_path: Path) -> None:
    for back_to, steps in ((None, (10, 12, 14, 16)), (10, (12, 14, 16)), (14, (18,))):
        _save(tmp_path, {step: float(step) for step in steps}, back_to=back_to)
    assert read_kept(open_filesystem(tmp_path / ".run")) == {
        10: ("all",), 12: ("all",), 14: ("all",), 16: ("abandoned",), 18: ("all",)
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:Step 16 is damaged")
def test_a_later_save_of_a_step_that_turned_out_damaged_is_not_damaged(tmp_path: Path) -> None:
    _save(tmp_path, {10: 1.0, 14: 1.4, 16: 1.6})
    for file in (tmp_path / "step-16").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-9] + b"x" * 9)
    with CheckpointManager(tmp_path, every=1, run_id="job") as manager:
        restored = manager.restore(_state(-1.0))
        assert restored is not None and restored.step == 14
        for step in (15, 16, 17):
            manager.save(step, _state(float(step)))
    assert _save(tmp_path, {18: 1.0, 19: 1.0, 20: 1.0}, back_to=15, keep=Keep(last=2)) == [19, 20]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-19", "step-20"]


def test_replicas_are_left_behind_and_brought_back_together(tmp_path: Path) -> None:
    """Whichever of the nodes are there."""

    def held(step: int, save_id: str, replica_id: str) -> HeldStep:
        files = {f"__0_0_{save_id}.distcp": 10}
        return HeldStep(step, files, SavedStep(step, 1.0, {}, save_id, 10, replica_id, 1.0, 1), files, is_equal=True)

    first = ("node-0", [held(10, "a10", "r10"), held(16, "a16", "r16")])
    second = ("node-1", [held(10, "b10", "r10"), held(16, "b16", "r16")])
    restoring = Restoring.__new__(Restoring)
    restoring._abandoned = Abandoned()
    found = candidates([], [first])
    restoring._plan_to_abandon(found[1], (), found)
    assert restoring._to_abandon is not None
    restoring._abandoned = left = restoring._to_abandon.abandoned
    assert [one.is_abandoned for one in candidates([], [first, second], left)] == [True, False]
    found = candidates([], [second], left)
    restoring._plan_to_abandon(found[0], (), found)
    assert restoring._to_abandon is not None
    back = restoring._to_abandon.abandoned
    assert [one.is_abandoned for one in candidates([], [first, second], back)] == [False, False]


def test_the_step_that_was_restored_stays_until_what_is_newer_is_left_behind(tmp_path: Path) -> None:
    """It is uploaded again, and by the rule it would go, as the newer ones are of the run until the next save."""
    run, options = tmp_path / "run", {**_fast(tmp_path / "fast"), "fast_keep": 9}
    _save(run, {10: 1.0, 20: 2.0, 30: 3.0}, **options)
    shutil.rmtree(run / "step-10")
    with CheckpointManager(run, run_id="job", keep=Keep(last=2), **options) as manager:
        manager.restore(_state(-1.0), 10)
        manager.wait()
        assert sorted(path.name for path in run.glob("step-*")) == ["step-10", "step-20", "step-30"]
        manager.save(40, _state(4.0))
        manager.wait()
        assert [saved.step for saved in manager.steps()] == [10, 40]
    assert sorted(path.name for path in run.glob("step-*")) == ["step-10", "step-40"]
