"""SIGKILL of a rank, or of a node with all that it has, at each stage of a run.

Whatever is left: the next job, on as many ranks or on fewer, restores the newest step that the surviving files complete
(oracle.py says which), bit for bit, and goes on. Nothing is lost that the rules keep, and nothing else stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak.operator.look import MARK

from . import oracle
from .driver import Case, Copies, cases, check_left, earlier_run, kill, restarts, resume
from .stages import STAGES

pytestmark = pytest.mark.xdist_group("run_kills")  # the run that they begin with is made once

ALL = cases()
FAST = {
    Case("fast: half of a file written", "rank 3", 1),
    Case("copies: half of a file", "node 1", 1),
    Case("fast: published on one node", "node 0", "replicas"),
    Case("replicas: compared", "node 1", "replicas"),
    Case("upload: all files up", "node 1", 0),
    Case("fast tier: a data file removed", "rank 0", 1),
    Case("durable tier: `.metadata` removed", "node 0", 1),
    Case("restore: half of a file fetched", "node 0", 1),
}
assert FAST.issubset(ALL)


def _case(case: Case) -> Any:
    return pytest.param(case, id=str(case), marks=[] if case in FAST else [pytest.mark.slow])


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Copies], Path]:
    """Return the run that the killed jobs begin with, by its number of copies."""
    made: dict[Copies, Path] = {}

    def run_with(copies: Copies) -> Path:
        if copies not in made:
            made[copies] = earlier_run(tmp_path_factory.mktemp("earlier"), copies)
        return made[copies]

    return run_with


@pytest.mark.ci
@pytest.mark.parametrize("case", [_case(case) for case in ALL])
def test_killed(case: Case, earlier: Callable[[Copies], Path], tmp_path: Path) -> None:
    left = kill(case, earlier(case.copies), tmp_path)
    check_left(case, left)
    for number, node_of in enumerate(restarts(case)):
        directory = tmp_path / f"restart-{number}"
        directory.mkdir()
        resume(left, node_of, directory)


def test_every_stage_is_there() -> None:
    assert {case.stage for case in ALL} == {stage.name for stage in STAGES}
    assert {case.victim for case in ALL} == {"rank 0", "rank 3", "node 0", "node 1"}
    assert {len(set(nodes)) for case in ALL for nodes in restarts(case)} == {1, 2}


def test_the_oracle_sees_what_is_missing(earlier: Callable[[Copies], Path], tmp_path: Path) -> None:
    run = shutil.copytree(earlier(1), tmp_path / "run")
    nodes = [run / "node-0", run / "node-1"]
    assert oracle.complete_on_nodes(nodes) == oracle.complete_on_nodes(nodes[1:]) == {40, 50}
    next(nodes[1].glob("step-50/__1_*.distcp")).unlink()
    assert oracle.complete_on_nodes(nodes) == {40, 50}
    assert oracle.complete_on_nodes(nodes[1:]) == {40}
    for node in nodes:
        (node / "step-40" / ".metadata").unlink()
    assert oracle.complete_on_nodes(nodes) == {50}
    (run / "run" / "step-20" / MARK).touch()
    with next((run / "run" / "step-40").glob("*.distcp")).open("ab") as file:
        file.truncate(10)
    assert oracle.complete_in(run / "run") == set()
