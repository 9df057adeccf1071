"""Runs that save incrementally: what a step shares stays, under any rule, until no step needs it."""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, ConfigurationError, CorruptDataError, Keep, StorageError, load, save
from dcp_nvcomp.format.names import REMOVING, mark_name
from dcp_nvcomp.runs import list_run, pin_step, prune_run, unpin_step
from dcp_nvcomp.runs.background.stages import DurableStage
from dcp_nvcomp.runs.pruning import reasons_of
from dcp_nvcomp.runs.retention import SavedStep, what_goes
from dcp_nvcomp.runs.steps import References, RunSteps
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.saving import writer as writer_module
from dcp_nvcomp.saving.process_state import forget_all
from dcp_nvcomp.tools import clean, consolidate
from tests.checkpoints import damage

State = dict[str, Any]


def _state(head: int = 0) -> State:
    base = torch.randn(200, 500, generator=torch.Generator().manual_seed(1))
    return {"base": base, "head": torch.full((150, 150), float(head)), "step": head}


def _assert_loads(step: int, path: Path) -> None:
    found = {"base": torch.zeros(200, 500), "head": torch.zeros(150, 150), "step": -1}
    load(found, path, no_dist=True)
    expected = _state(step)
    assert torch.equal(found["base"], expected["base"]) and torch.equal(found["head"], expected["head"])
    assert found["step"] == step


def _manager(run: Path, **options: Any) -> CheckpointManager:
    usual: dict[str, Any] = {"every": 1, "incremental": True, "asynchronous": False}
    return CheckpointManager(run, **{**usual, **options})


def _shares(run: Path) -> dict[int | None, tuple[str, ...]]:
    return {step.step: step.shares for step in list_run(run).steps}


def test_a_step_that_others_need_stays(tmp_path: Path) -> None:
    with _manager(tmp_path, keep=Keep(last=2)) as manager:
        for step in range(1, 6):
            manager.save(step, _state(step))
            manager.wait()
        assert _shares(tmp_path) == {1: (), 4: ("step-1",), 5: ("step-1",)}
        assert reasons_of(tmp_path)[1] == ("shared by 4",)
        marks = {path.name for path in (tmp_path / "step-1").glob(".shared.*")}
        assert marks == {mark_name("step-4"), mark_name("step-5")}, "those of steps that are gone went with them"
        changed = {**_state(6), "base": torch.randn(200, 500)}
        manager.save(6, changed)
        manager.wait()
        manager.save(7, {**changed, "step": 7})
        manager.wait()
        assert _shares(tmp_path) == {6: (), 7: ("step-6",)}, "nobody needs step 1 any more"
    _assert_is_small(tmp_path / "step-7", tmp_path / "step-6")


def test_after_a_restore_that_failed_nothing_is_shared(tmp_path: Path) -> None:
    """All steps need the file that is damaged: the next one must not."""
    with _manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    damage(tmp_path / "step-1")
    with _manager(tmp_path) as manager:
        with pytest.raises(CorruptDataError), pytest.warns(RuntimeWarning, match="Step . is damaged"):
            manager.restore({"base": torch.zeros(200, 500), "head": torch.zeros(150, 150), "step": -1})
        for step in (3, 4):
            manager.save(step, _state(step))
    assert _shares(tmp_path) == {1: (), 2: ("step-1",), 3: (), 4: ("step-3",)}
    _assert_loads(4, tmp_path / "step-4")


def _assert_is_small(path: Path, beside: Path) -> None:
    sizes = [sum(file.stat().st_size for file in one.glob("*.distcp")) for one in (path, beside)]
    assert sizes[0] < 0.1 * sizes[1]


@pytest.mark.parametrize("forgets", [False, True], ids=["same process", "another process"])
def test_a_run_goes_on_with_references(tmp_path: Path, forgets: bool) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
    if forgets:
        forget_all()
    state = _state(9)
    with _manager(tmp_path) as manager:
        event = manager.restore(state)
        assert event is not None and event.step == 2
        manager.save(3, _state(3))
    assert _shares(tmp_path) == {1: (), 2: ("step-1",), 3: ("step-1",)}
    for step in (1, 2, 3):
        _assert_loads(step, tmp_path / f"step-{step}")


def test_a_run_that_goes_back_shares_with_the_step_that_it_went_back_to(tmp_path: Path) -> None:
    with _manager(tmp_path, keep=Keep(last=3)) as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
        manager.restore(_state(), step=2)
        manager.save(3, _state(3))
        manager.save(4, _state(4))
        assert _shares(tmp_path) == {1: (), 2: ("step-1",), 3: ("step-1",), 4: ("step-1",)}
        manager.restore(_state(), step=1)
        manager.save(1, _state(1))
        assert _shares(tmp_path)[1] == (), "it can't share with what it replaces"
    for step in (1, 2, 3):
        if (tmp_path / f"step-{step}").exists():
            _assert_loads(step, tmp_path / f"step-{step}")


def test_what_a_save_refers_to_is_not_removed_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    """Step 4 begins while step 3 is on its way, and so it has what step 2 has, which no rule keeps."""
    staged, pruned = threading.Event(), threading.Event()
    leave_marks, prune = writer_module.leave_marks, DurableStage.prune

    def late(filesystem: Any, directory: str, names: Any, save_id: str) -> None:
        if directory in ("step-3", "step-4"):
            assert (staged if directory == "step-3" else pruned).wait(60)
        leave_marks(filesystem, directory, names, save_id)

    def told(stage: Any) -> None:
        prune(stage)
        if staged.is_set():
            pruned.set()

    monkeypatch.setattr(writer_module, "leave_marks", late)
    monkeypatch.setattr(DurableStage, "prune", told)
    other = {"base": torch.randn(200, 500)}
    with _manager(tmp_path, keep=Keep(last=1), asynchronous=True) as manager:
        manager.save(1, {**_state(1), **other})
        manager.save(2, _state(2))
        manager.wait()
        manager.save(3, {**_state(3), **other})
        saving = manager.save(4, _state(4))
        staged.set()
        saving.saved.result(60)
    assert _shares(tmp_path) == {2: (), 4: ("step-2",)}
    _assert_loads(4, tmp_path / "step-4")


def test_prune_keeps_what_is_shared_also_by_what_is_no_step(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
    forget_all()
    save(_state(8), tmp_path / "best", no_dist=True, reference=tmp_path / "step-1")
    pruned = prune_run(tmp_path, Keep(last=1))
    assert [saved.step for saved in pruned.removed] == [2]
    assert pruned.kept[1] == ("shared by best",) == prune_run(tmp_path, Keep(last=1), dry_run=True).kept[1]
    consolidate(tmp_path / "step-3")
    assert [saved.step for saved in prune_run(tmp_path, Keep(last=1)).removed] == []
    _assert_loads(8, tmp_path / "best")
    shutil.rmtree(tmp_path / "best")
    _age_marks(tmp_path / "step-1")
    assert [saved.step for saved in prune_run(tmp_path, Keep(last=1)).removed] == [1]
    _assert_loads(3, tmp_path / "step-3")


def _age_marks(path: Path) -> None:
    for mark in path.glob(".shared.*"):
        os.utime(mark, (time.time() - 7200, time.time() - 7200))


def test_a_step_that_is_needed_since_it_was_listed_stays(tmp_path: Path, monkeypatch: Any) -> None:
    with _manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {**_state(step), "base": torch.full((200, 500), float(step))})
    save({**_state(8), "base": torch.ones(200, 500)}, tmp_path / "best", no_dist=True, reference=tmp_path / "step-1")
    monkeypatch.setattr(DurableTier, "_needed", lambda tier, step, marks: "")
    pruned = prune_run(tmp_path, Keep(last=1))
    assert pruned.removed == () and "shared" in pruned.kept[1][0]
    assert not (tmp_path / "step-1" / REMOVING).exists()


def test_prune_removes_a_step_and_what_it_shares_at_once(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
        manager.save(3, {**_state(3), "base": torch.ones(200, 500)})
    assert [saved.step for saved in prune_run(tmp_path, Keep(last=1)).removed] == [1, 2]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3"]


def test_a_pinned_step_keeps_what_it_shares(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
        manager.save(3, {**_state(3), "base": torch.ones(200, 500)})
    pin_step(tmp_path, 2)
    assert prune_run(tmp_path, Keep(last=1)).removed == ()
    _assert_loads(2, tmp_path / "step-2")
    unpin_step(tmp_path, 2)
    assert [saved.step for saved in prune_run(tmp_path, Keep(last=1)).removed] == [1, 2]


def test_a_save_does_not_share_with_a_step_that_is_being_removed(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, _state(1))
        (tmp_path / "step-1" / REMOVING).touch()
        manager.save(2, _state(2))
        manager.save(3, _state(3))
        shared = _shares(tmp_path)
    assert not shared[2] and shared[3] == ("step-2",)


def test_a_step_whose_reference_is_gone_is_damaged(tmp_path: Path) -> None:
    """Although it was written down that it is complete."""
    with _manager(tmp_path, keep=Keep(last=9)) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
        manager.save(3, {**_state(3), "base": torch.ones(200, 500)})
        manager.save(4, {**_state(4), "base": torch.ones(200, 500)})
    shutil.rmtree(tmp_path / "step-3")
    forget_all()
    state = _state()
    with _manager(tmp_path) as manager:
        assert [saved.step for saved in manager.steps()] == [1, 2]
        with pytest.warns(RuntimeWarning, match="Step 4 is damaged, so the one before it is taken"):
            event = manager.restore(state)
        assert event is not None and event.step == 2 and state["step"] == 2
    (listed,) = [step for step in list_run(tmp_path).steps if step.step == 4]
    assert listed.state == "damaged" and "../step-3/" in listed.problem
    with pytest.raises(StorageError, match="shares this file with 'step-3'"):
        load(_state(), tmp_path / "step-4", no_dist=True)


def test_clean_leaves_what_others_need(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, _state(1))
        manager.save(2, _state(2))
    (tmp_path / "step-1" / ".metadata").unlink()
    for copy in (tmp_path / "step-1").glob("__*.metadata"):
        copy.unlink()
    assert clean(tmp_path / "step-1", older_than_seconds=3600.0).orphans == ()
    _assert_loads(2, tmp_path / "step-2")


def test_a_chain_goes_at_once(tmp_path: Path) -> None:
    """Step 3 needs step 2, and step 2 step 1."""
    state = {key: torch.randn(200, 200) for key in "abc"}
    with _manager(tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, {**state, "b": torch.randn(200, 200)})
        manager.save(3, {"a": torch.randn(200, 200), "b": torch.randn(200, 200), "c": state["c"]})
        manager.save(4, {"a": torch.randn(200, 200), "b": torch.randn(200, 200), "c": torch.randn(200, 200)})
    assert _shares(tmp_path) == {1: (), 2: ("step-1",), 3: ("step-1",), 4: ()}
    assert [saved.step for saved in prune_run(tmp_path, Keep(last=1)).removed] == [1, 2, 3]


def test_a_step_that_is_saved_again_is_not_referred_to_while_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    free = threading.Event()
    leave_marks = writer_module.leave_marks
    late = threading.Event()

    def slow(filesystem: Any, directory: str, names: Any, save_id: str) -> None:
        if directory == "step-2" and late.is_set():
            assert free.wait(60)
        leave_marks(filesystem, directory, names, save_id)

    monkeypatch.setattr(writer_module, "leave_marks", slow)
    with _manager(tmp_path, asynchronous=True) as manager:
        manager.save(1, _state(1))
        manager.save(2, {**_state(2), "base": torch.ones(200, 500)})
        manager.wait()
        manager.restore(_state(), step=1)
        late.set()
        manager.save(2, _state(2))
        saving = manager.save(3, {**_state(3), "base": torch.ones(200, 500)})  # as the old step 2 has it
        free.set()
        saving.saved.result(60)
        assert _shares(tmp_path) == {1: (), 2: ("step-1",), 3: ()}
        _assert_loads(2, tmp_path / "step-2")
        manager.restore(_state(), step=1)
        manager.save(2, {**_state(2), "base": torch.zeros(200, 500)})
        manager.save(3, {**_state(3), "base": torch.zeros(200, 500)}).saved.result(60)  # as the new one has it
    assert _shares(tmp_path) == {1: (), 2: (), 3: ()}


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't work with a fast tier"):
        _manager(tmp_path, fast=tmp_path / "fast")
    with pytest.raises(ConfigurationError, match=re.escape("incremental=True")):
        CheckpointManager(tmp_path, reference=())
    with pytest.raises(ConfigurationError, match="incremental"):
        _manager(tmp_path, incremental="yes")


def test_references_are_of_the_last_saves() -> None:
    found = References(RunSteps((SavedStep(7, 0.0),), (), (), ()))
    assert [found.of(step) for step in (8, 9, 10, 10)] == [(7,), (8, 7), (9, 8), (9,)]
    found.go_on_from(3)
    assert found.of(4) == (3,)
    assert found.of(5) == (3,), "step 4 is saved again: what is there may be what it was before"
    assert found.of(11) == (4,), "and so is step 5, while step 4 is over"
    found.go_on_from(None)
    assert found.of(1) == References(RunSteps((), (), (), ())).of(1) == ()


@pytest.mark.parametrize("keep", [Keep(last=1), Keep(last=1, every=20), Keep(last=3, milestones=(10,))])
def test_what_goes_shares_with_nothing_that_stays(keep: Keep) -> None:
    """Of a model in which each step may share with any earlier ones, over several steps too."""
    for seed in range(200):
        random_ = random.Random(seed)
        needs = {
            step: random_.sample(range(0, step, 10), min(step // 10, random_.choice((0, 0, 1, 2))))
            for step in range(0, 100, 10)
        }
        steps = [SavedStep(step, float(step)) for step in needs]
        left = {step for step in needs if random_.random() < 0.2 and step < 90}
        doomed = what_goes(
            keep,
            [one for one in steps if one.step not in left],
            [one for one in steps if one.step in left],
            lambda: {step for step in needs if random.Random(seed).random() < 0.1},
            lambda saved: needs[saved.step],
        )
        assert doomed.why.keys() | doomed.kept.keys() == needs.keys()
        assert not doomed.why.keys() & doomed.kept.keys()
        for step in doomed.kept:
            assert not doomed.why.keys() & set(needs[step]), seed
        plain = what_goes(
            keep,
            [one for one in steps if one.step not in left],
            [one for one in steps if one.step in left],
            lambda: {step for step in needs if random.Random(seed).random() < 0.1},
        )
        extra = doomed.kept.keys() - plain.kept.keys()
        assert all(doomed.kept[step][0].startswith("shared by") for step in extra)
        assert doomed.why.keys() <= plain.why.keys()
