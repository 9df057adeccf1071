"""The oracle of the operator's soak can fail: it sees what is harmed, and what is not as it must be."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, Keep

from .harms import HARMS
from .oracle import Before, Finding, Known, Oracle

LOSS = {10: 0.1, 20: 0.3, 30: 0.2, 40: 0.4}
HARMLESS = {"foreign file", "garbage", "step half copied"}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("earlier") / "run"
    state = {"w": torch.arange(1000.0), "facts": {"text": "x"}}
    with CheckpointManager(root, every=10, preemption_signals=(), sync_files=False) as manager:
        for step in (10, 20):
            manager.save(step, state, metrics={"tag": 100 + step})
    return root


@pytest.fixture
def run(tmp_path: Path, earlier: Path) -> Path:
    return shutil.copytree(earlier, tmp_path / "run")


def _oracle() -> Oracle:
    return Oracle(known={100 + step: Known(step, (), loss) for step, loss in LOSS.items()})


def _before(*steps: int, possible: tuple[int, ...] = (), harmed: tuple[int, ...] = ()) -> Before:
    sure = frozenset((step, 100 + step) for step in steps)
    more = frozenset((step, 100 + step) for step in possible)
    tags = {step: 100 + step for step in (*steps, *harmed)}
    times = {place: float(place[0]) for place in tags.items()}
    return Before(sure, sure | more, {step: tags[step] for step in steps}, tags, times)


def _word(step: int | None, **changes: Any) -> Mapping[str, object]:
    return {"step": step, "tag": None if step is None else 100 + step, "line": [], "wrong": [], **changes}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_harmed_is_not_whole(run: Path, harm: str) -> None:
    oracle, draw = _oracle(), random.Random(3)
    assert oracle.before(run, ()).sure == {(10, 110), (20, 120)}
    assert HARMS[harm](draw, oracle.look, run) is not None
    whole = oracle.before(run, ()).sure
    assert len(whole) == (2 if harm in HARMLESS else 1), whole


def test_files_of_all_nodes_together_make_a_step(tmp_path: Path, run: Path) -> None:
    node, other = tmp_path / "node-0", tmp_path / "node-1"
    run.rename(node)
    (other / "step-20").mkdir(parents=True)
    (file,) = (node / "step-20").glob("*.distcp")
    file.rename(other / "step-20" / file.name)
    assert _oracle().before(tmp_path / "none", [node, other]).newest == (20, 120)
    assert _oracle().before(tmp_path / "none", [node]).newest == (10, 110)


def test_a_step_is_whole_with_the_files_that_it_shares(tmp_path: Path) -> None:
    run, oracle, state = tmp_path / "run", _oracle(), {"w": torch.arange(200_000)}
    with CheckpointManager(run, every=10, preemption_signals=(), sync_files=False, incremental=True) as manager:
        for step in (10, 20, 30):
            manager.save(step, state | {"step": step}, metrics={"tag": 100 + step})
            manager.wait()  # the next one shares with what is published
    assert oracle.before(run, ()).newest == (30, 130)
    assert oracle.look.sharing(run, {10}) == {20, 30}
    assert oracle.look.sharing(run, {20}) == oracle.look.sharing(run, set()) == set()
    shutil.rmtree(run / "step-20")
    assert oracle.before(run, ()).newest == (30, 130)
    next((run / "step-10").glob("*.distcp")).unlink()
    assert oracle.before(run, ()).newest is None


def test_the_newest_is_what_is_restored() -> None:
    before = _before(10, 20, possible=(30,))
    _oracle().check_restored(before, _word(20), None)
    _oracle().check_restored(before, _word(30), None)  # not all of it was seen, but it was whole after all
    _oracle().check_restored(before, _word(10), 10)
    for word, asked in [(_word(10), None), (_word(None), None), (_word(40), None), (_word(20), 10)]:
        with pytest.raises(Finding):
            _oracle().check_restored(before, word, asked)


@pytest.mark.parametrize("changes", [{"wrong": ["large"]}, {"tag": 110}, {"line": [7]}, {"tag": 999}])
def test_values_are_those_that_were_saved(changes: dict[str, Any]) -> None:
    with pytest.raises(Finding):
        _oracle().check_restored(_before(10, 20), _word(20, **changes), None)


def test_what_was_left_behind_does_not_come_back() -> None:
    oracle, before = _oracle(), _before(10, 20, 30)
    oracle.went_back(before, (10, 110), before.possible, is_sure=True)
    assert (oracle.left, oracle.unsure) == ({120, 130}, set())
    with pytest.raises(Finding, match="left it behind"):
        oracle.check_restored(before, _word(30), None)
    oracle.went_back(before, (20, 120), before.possible, is_sure=True)
    assert oracle.left == {130}


@pytest.mark.parametrize(
    ("rules", "pins", "lost"),
    [
        ([None], set(), 10),
        ([Keep(last=2)], set(), 20),
        ([Keep(last=1, every=10)], set(), 10),
        ([Keep(last=1, milestones=(10,))], set(), 10),
        ([Keep(last=1)], {10}, 10),
        ([Keep(last=1), Keep(last=2)], set(), 30),
        ([Keep(last=1, newer_than=15.0)], set(), 20),
    ],
)
def test_what_is_kept_is_there(rules: list[Keep | None], pins: set[int], lost: int) -> None:
    steps = [10, 20, 30]
    oracle, before = _oracle(), _before(*steps)
    oracle.pins = pins
    after = _before(*(step for step in steps if step != lost))
    with pytest.raises(Finding, match="lost"):
        oracle.check_kept(before, after, [], [], rules)
    oracle.check_kept(before, after, [], [lost], rules)
    oracle.check_kept(before, before, [], [], rules)


def test_what_no_rule_keeps_may_go() -> None:
    oracle, before = _oracle(), _before(10, 20, 30)
    for rules in ([Keep(last=1)], [None, Keep(last=2)], [Keep(last=1, newer_than=15.0)]):
        oracle.check_kept(before, _before(20, 30), [], [], rules)


def test_a_step_whose_bytes_were_harmed_counts_or_not() -> None:
    """As for the rule, which sees names and sizes."""
    oracle, before = _oracle(), _before(10, 30, harmed=(20,))
    oracle.check_kept(before, _before(30, harmed=(20,)), [], [], [Keep(last=2)])
    with pytest.raises(Finding, match="lost"):
        oracle.check_kept(before, _before(10, harmed=(20,)), [], [], [Keep(last=2)])
    with pytest.raises(Finding, match="lost"):
        oracle.check_kept(before, _before(30, harmed=(20,)), [], [], [Keep(last=3)])


def test_the_time_of_a_step_is_that_of_its_save() -> None:
    """An earlier save of the step may have been later, by the run's time."""
    oracle, before = _oracle(), _before(10, 20, 30)
    oracle.known[220] = Known(20, (), 1.0)
    after = _before(10, 30)
    oracle.check_kept(before, after, [(20, 220)], [], [Keep(last=1, newer_than=15.0)])
    with pytest.raises(Finding, match="lost"):
        oracle.check_kept(before, after, [], [], [Keep(last=1, newer_than=15.0)])
