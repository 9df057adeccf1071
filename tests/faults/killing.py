"""Saves of two ranks of which one is killed, and what they leave."""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_nvcomp import async_save

from . import forked
from .failpoints import BY_NAME, STAGES, KillingPlanner, Stage
from .saves import loaded, new_writer, sharded

ATTEMPTS = 3


@dataclass(frozen=True)
class Case:
    """One killed save."""

    writer: str  # "ours" or "stock"
    how: str  # "sync", the "thread" or "process" of `dcp.async_save`, or "staged" by this package's `async_save`
    path: str  # "fresh", with an earlier checkpoint elsewhere, or "overwrite"
    stage: str  # name of a stage
    victim: int  # the rank that is killed

    def __str__(self) -> str:
        return "-".join([self.writer, self.how, self.path, self.stage.replace(" ", "_"), f"rank_{self.victim}"])


@dataclass(frozen=True)
class Killed:
    """The end of the ranks of a case."""

    checkpoint: Path  # where they saved
    earlier: Path  # where the earlier checkpoint is; the same with "overwrite"
    errors: dict[int, str]  # of the rank that was not killed, as text; with the process checkpointer of both ranks
    seconds: float  # how long it took until both had ended


def cases(writer: str, how: str) -> list[Case]:
    """All cases of a writer and a way to save: every stage that it has, on every path that has it, for every rank."""

    def has(stage: Stage, path: str) -> bool:
        reached = getattr(stage, writer) is not None and (how == "staged" or not stage.staged)
        return reached and (stage.fresh or path == "overwrite")

    paths = ("fresh", "overwrite")
    return [
        Case(writer, how, path, stage.name, victim)
        for stage in STAGES
        for path in paths
        if has(stage, path)
        for victim in range(forked.WORLD_SIZE)
    ]


def _save_earlier(writer: str, checkpoint: Path) -> None:
    dcp.save(sharded("old"), storage_writer=new_writer(writer, checkpoint))


def _save_killed(case: Case, directory: Path, checkpoint: Path) -> None:
    state, writer = sharded("new"), new_writer(case.writer, checkpoint)
    planner = KillingPlanner(case.stage, case.writer, case.victim, directory)
    if case.how == "sync":
        dcp.save(state, storage_writer=writer, planner=planner)
        return
    if case.how == "staged":
        future: Any = async_save(state, storage_writer=writer, planner=planner).upload_completion
    else:
        kind = AsyncCheckpointerType.THREAD if case.how == "thread" else AsyncCheckpointerType.PROCESS
        future = dcp.async_save(state, storage_writer=writer, planner=planner, async_checkpointer_type=kind)
    for value in state.values():  # training goes on
        if not isinstance(value, str):
            value.to_local().fill_(-1)
    future.result(timeout=2 * forked.GROUP_SECONDS)  # what it waits for ends after one


def save_earlier(writer: str, directory: Path) -> Path:
    """Save the earlier checkpoint, by two ranks that come to their end."""
    for attempt in range(ATTEMPTS):
        place = directory / f"{writer}-{attempt}"
        place.mkdir(parents=True)
        ends = forked.run(_save_earlier, writer, place / "c", directory=place)
        if not any(end.error for end in ends):
            assert loaded(writer, place / "c") == "old"
            return place / "c"
    raise AssertionError(f"The ranks could not save at all: {ends}")


def run_case(case: Case, earlier: Path, directory: Path) -> Killed:
    """Let two ranks save and kill one of them."""
    for attempt in range(ATTEMPTS):  # gloo sometimes fails to connect local ranks: then no save has begun
        place = directory / f"attempt-{attempt}"
        place.mkdir(parents=True)
        kept = place / "kept"
        checkpoint = kept if case.path == "overwrite" else place / "new"
        shutil.copytree(earlier, kept)
        start = time.monotonic()
        ends = forked.run(
            _save_killed, case, place, checkpoint, directory=place, checkpointer=case.how == "process", lost=case.victim
        )
        seconds = time.monotonic() - start
        if (place / "pid-0").exists() and (place / "pid-1").exists():
            break
    _assert_killed(case, place, ends)
    return Killed(
        checkpoint, kept, {rank: end.error for rank, end in enumerate(ends) if end.error is not None}, seconds
    )


def _assert_killed(case: Case, place: Path, ends: list[forked.End]) -> None:
    fired = place / "fired"
    assert fired.exists(), f"{case}: the stage was never reached: {ends}"
    victim = (place / f"pid-{case.victim}").read_text()
    assert fired.read_text() == f"{case.stage}\n{victim}"
    lost = ends[case.victim]
    exit_code = lost.checkpointer_exit_code if case.how == "process" else lost.exit_code
    assert exit_code == -signal.SIGKILL, f"{case}: {ends}"
    assert ends[1 - case.victim].exit_code == 0, f"{case}: the other rank hangs: {ends}"


def outcome(case: Case, killed: Killed) -> str:
    """Return "old" or "new"; else "mixed" (parts of both), "lost" (it can't be loaded) or "wrong" (nobody saved it)."""
    found = loaded(case.writer, killed.checkpoint)
    if case.path == "overwrite":
        return "lost" if found == "nothing" else found
    kept = loaded(case.writer, killed.earlier)
    if kept != "old":
        return "lost" if kept == "nothing" else kept
    return "old" if found == "nothing" else found


def _other_rank_goes_on(case: Case) -> bool:
    """Rank 1 is killed while rank 0 commits."""
    names = [stage.name for stage in STAGES]
    return case.victim == 1 and names.index(case.stage) >= names.index("commit begins")


def expected_outcome(case: Case) -> str:
    """Return what must be left of a case of ours."""
    return "new" if BY_NAME[case.stage].published or _other_rank_goes_on(case) else "old"


def may_succeed(case: Case) -> bool:
    """Whether the rank that is not killed may come to its end: it has published, and all it missed is to say so."""
    return _other_rank_goes_on(case)
