"""Jobs that are killed, and jobs that go on from what they left.

    four ranks on two nodes save 10, 20, 30, 40, 50      fast tier 40, 50 on both nodes; durable tier 20, 40
    the job that is killed restores 50 and saves 60      60 is due for both tiers; 40 goes from the fast one, 20 from
                                                         the durable one
    the next job restores what must be there, saves two steps more, and restores the last of them

A lost node takes its directory with it. Each save of a job has values of its own, so that a step that two jobs saved
is told apart.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointManager, Keep, load
from dcp_nvcomp.runs.tiers import nodes as transfer
from dcp_nvcomp.runs.tiers import uploads
from tests.faults import forked
from tests.runs import jobs

from . import oracle
from .stages import BY_NAME, STAGES, Stage

EVERY, FAST_EVERY, KEPT = 20, 10, 2
EARLIER = (10, 20, 30, 40, 50)
KILLED_STEP = 60
NODES = ("node-0", "node-1")
RANKS_OF = {"rank 0": (0,), "rank 3": (3,), "node 0": (0, 1), "node 1": (2, 3)}
PIECE_NBYTES = 1 << 10  # so that the small files of these tests have several
ATTEMPTS = 3

Copies: TypeAlias = int | Literal["replicas"]


@dataclass(frozen=True)
class Case:
    """A job that is killed."""

    stage: str  # name of a stage
    victim: str  # a key of `RANKS_OF`; a node's directory is lost too
    copies: Copies  # on how many peers the files of each node are; or each node is a replica

    def __str__(self) -> str:
        return "-".join(part.replace(" ", "_") for part in (self.stage, self.victim, f"copies_{self.copies}"))

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """The nodes of which nothing is left."""
        before = (self.lost_before,) if self.lost_before else ()
        victims = (self.victim.replace(" ", "-"),) if self.victim.startswith("node") else ()
        return tuple(dict.fromkeys((*before, *victims)))

    @property
    def lost_before(self) -> str | None:
        """The node that is new when the job begins, so that it fetches from its peer."""
        return "node-1" if BY_NAME[self.stage].during == "restore" else None


@dataclass(frozen=True)
class Place:
    """Where a job runs."""

    path: Path  # holds the durable tier, `run`, and the directories of the nodes
    node_of: tuple[str, ...]  # the directory of each rank's node, by rank
    copies: Copies  # as for `Case`

    @property
    def run(self) -> Path:
        """The durable tier."""
        return self.path / "run"

    @property
    def nodes(self) -> list[Path]:
        """The directories of the nodes."""
        return [self.path / node for node in dict.fromkeys(self.node_of)]

    @property
    def replicas(self) -> int:
        """How many replicas of the state there are."""
        return len(self.nodes) if self.copies == "replicas" else 1


FOUR_RANKS = (NODES[0], NODES[0], NODES[1], NODES[1])


def cases() -> list[Case]:
    """All cases: each stage, each victim.

    Without copies the loss of a node during a save, which copies are for; with replicas all but removals.
    """
    with_copies = [Case(stage.name, victim, 1) for stage in STAGES for victim in stage.victims if not _compares(stage)]
    without = [
        Case(stage.name, victim, 0)
        for stage in STAGES
        for victim in ("node 0", "node 1")
        if stage.name.startswith(("fast:", "upload:"))
    ]
    with_replicas = [
        Case(stage.name, victim, "replicas")
        for stage in STAGES
        for victim in ("rank 3", "node 0", "node 1")
        if stage.name.startswith(("fast:", "replicas:", "upload:", "restore:"))
    ]
    return with_copies + without + with_replicas


def _compares(stage: Stage) -> bool:
    return stage.name.startswith("replicas:")


def restarts(case: Case) -> list[tuple[str, ...]]:
    """The nodes by rank of the jobs that go on: as before, and with fewer ranks on one node that is left, or on two."""
    left = [node for node in NODES if node not in case.lost_nodes] or list(NODES)
    number = STAGES.index(BY_NAME[case.stage]) + list(RANKS_OF).index(case.victim)
    fewer = (left[-1], left[-1]) if number % 2 else NODES
    return [FOUR_RANKS, fewer]


def values_of(job: int, step: int) -> int:
    """Return the seed of what a job saves."""
    return 1_000_000 * job + step


def manager_of(place: Place) -> CheckpointManager:
    """Return this rank's manager."""
    node = place.node_of[dist.get_rank()]
    return CheckpointManager(
        place.run,
        every=EVERY,
        keep=Keep(last=KEPT),
        fast=place.path / node,
        fast_every=FAST_EVERY,
        fast_keep=KEPT,
        copies=place.copies if len(place.nodes) > 1 else 0,
        node=node,
        run_id="job",
        preemption_signals=(),
    )


def _save(manager: CheckpointManager, place: Place, job: int, steps: Sequence[int]) -> None:
    for step in steps:
        state = jobs.state_of(values_of(job, step), place.replicas)
        manager.save(step, state)
        jobs.spoil(state)
    manager.wait()


def save_earlier(place: Place, where: Path) -> None:
    """Save the steps that are there when the job begins that is killed."""
    with manager_of(place) as manager:
        _save(manager, place, 0, EARLIER)


def be_killed(place: Place, stage_name: str, victims: Sequence[int], where: Path) -> None:
    """Restore and save, with the stage armed."""
    stage = BY_NAME[stage_name]
    transfer._PIECE_NBYTES = uploads._PIECE_NBYTES = PIECE_NBYTES
    armed = dist.get_rank() == _striker(stage.reached_by, victims)
    if place.copies == "replicas" and stage.reached_by == "all":
        armed = True  # of the replicas one uploads, whichever was done first; the first rank to get there strikes
    with manager_of(place) as manager:
        if armed and stage.during == "restore":
            stage.seam.arm(lambda: strike(where, victims))
        manager.restore(jobs.state_of(987654, place.replicas))
        if armed and stage.during == "save":
            stage.seam.arm(lambda: strike(where, victims))
        _save(manager, place, 1, [KILLED_STEP])


def strike(where: Path, victims: Sequence[int]) -> None:
    """Kill ranks, this one last if it is among them; only the first call does."""
    try:
        (where / forked.FIRED).touch(exist_ok=False)
    except FileExistsError:
        return
    pids = [int((where / f"pid-{victim}").read_text()) for victim in victims]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _run(function: Callable[..., Any], *arguments: Any, world_size: int, directory: Path) -> list[forked.End]:
    return forked.run(function, *arguments, world_size=world_size, directory=directory, gets_directory=True)


def _striker(reached_by: str, victims: Sequence[int]) -> int:
    """Return the rank that comes to the stage."""
    return {"all": victims[0], "leaders": victims[0] // 2 * 2, "coordinator": 0}[reached_by]


def go_on(place: Place, step: int, seed: int, where: Path) -> None:
    """Restore what must be there, save two steps more, and restore the last one with a manager of its own."""
    later = [step + FAST_EVERY, step + 2 * FAST_EVERY]
    with manager_of(place) as manager:
        state = jobs.state_of(987654, place.replicas)
        restored = manager.restore(state)
        assert restored is not None and (restored.step, restored.damaged) == (step, ()), restored
        jobs.assert_state_of(seed, state, place.replicas)
        _save(manager, place, 2, later)
    with manager_of(place) as manager:
        state = jobs.state_of(987654, place.replicas)
        again = manager.restore(state)
        assert again is not None and (again.step, again.damaged) == (later[-1], ()), again
        jobs.assert_state_of(values_of(2, later[-1]), state, place.replicas)
    dist.barrier()  # a rank that is gone fails the groups of those that still make the same state


def earlier_run(directory: Path, copies: Copies) -> Path:
    """Make the run that the killed jobs begin with."""
    for attempt in range(ATTEMPTS):
        place = Place(directory / str(attempt), FOUR_RANKS, copies)
        place.path.mkdir(parents=True)
        ends = _run(save_earlier, place, world_size=4, directory=directory / f"ranks-{attempt}")
        if all(end.exit_code == 0 and not end.error for end in ends):
            assert oracle.complete_on_nodes(place.nodes) == {40, 50}
            assert oracle.complete_in(place.run) == {20, 40}
            return place.path
    raise AssertionError(f"The ranks could not save at all: {ends}")


def kill(case: Case, earlier: Path, directory: Path) -> Place:
    """Run the job that is killed."""
    place = Place(directory / "left", FOUR_RANKS, case.copies)
    for attempt in range(ATTEMPTS):  # gloo sometimes can't connect the manager's groups either: nothing has happened
        shutil.rmtree(place.path, ignore_errors=True)
        _move(earlier, place.path)
        if case.lost_before is not None:
            shutil.rmtree(place.path / case.lost_before)
        where = directory / f"killed-{attempt}"
        victims = RANKS_OF[case.victim]
        ends = _run(be_killed, place, case.stage, victims, world_size=4, directory=where)
        if any(where.glob(f"*/{forked.FIRED}")):
            break
    assert any(where.glob(f"*/{forked.FIRED}")), f"{case}: the stage was never reached: {ends}"
    assert all(ends[victim].exit_code == -signal.SIGKILL for victim in victims), f"{case}: {ends}"
    for node in case.lost_nodes:
        shutil.rmtree(place.path / node, ignore_errors=True)
    return place


def _move(source: Path, target: Path) -> None:
    """Copy a run with its fast tiers so that it is taken for the one that was copied."""
    shutil.copytree(source, target)
    file = target / "run" / ".run" / "id"
    file.write_text(file.read_text().partition("\n")[0])  # a copy that knows of its original is another run


def check_left(case: Case, left: Place) -> None:
    """Check that nothing is lost that the rules keep."""
    durable = oracle.complete_in(left.run)
    kept = oracle.last(KEPT, {20, 40} | durable)
    assert kept <= durable, f"lost of the durable tier: {sorted(kept - durable)}"
    if len(case.lost_nodes) <= (1 if case.copies == "replicas" else case.copies):
        fast = oracle.complete_on_nodes(left.nodes)
        kept = oracle.last(KEPT, {40, 50} | fast)
        assert kept <= fast, f"lost of the fast tier: {sorted(kept - fast)}"


def resume(left: Place, node_of: tuple[str, ...], directory: Path) -> int:
    """Let the next job go on from a copy of what is left, and check all that it does; return what it restored."""
    path = directory / "again"
    _move(left.path, path)
    place = Place(path, node_of, left.copies)
    durable, fast = oracle.complete_in(place.run), oracle.complete_on_nodes(place.nodes)
    newest = max(durable | fast)
    seed = values_of(1 if newest == KILLED_STEP else 0, newest)
    _resume(place, newest, seed, directory)
    later = {newest + FAST_EVERY, newest + 2 * FAST_EVERY}
    uploaded = {step for step in fast | later if step % EVERY == 0 and step > max(durable)}
    _check_after(place, oracle.last(KEPT, durable | uploaded), later)
    return newest


def _resume(place: Place, newest: int, seed: int, directory: Path) -> None:
    ends = _run(go_on, place, newest, seed, world_size=len(place.node_of), directory=directory / "resumed")
    assert not any(end.exit_code is None for end in ends), f"the next job hangs:\n{[end.log for end in ends]}"
    errors = "\n".join(str(end.error or end.log) for end in ends if end.exit_code != 0 or end.error)
    assert not errors, errors


def _check_after(place: Place, kept: set[int], later: set[int]) -> None:
    """Check both tiers after the next job."""
    assert oracle.complete_in(place.run) == oracle.steps_in(place.run) == kept
    assert oracle.complete_on_nodes(place.nodes) == later
    assert all(oracle.steps_in(node) == later for node in place.nodes), "what nobody needs fills memory"
    for step in kept:
        job = 2 if step in later else 1 if step == KILLED_STEP else 0
        state = {"w": torch.zeros(jobs.SHAPE), "bias": torch.zeros(jobs.SHAPE[1]), "step": -1}
        load(state, place.run / f"step-{step}", no_dist=True)
        jobs.assert_state_of(values_of(job, step), state)
