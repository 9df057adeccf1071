"""Saves of two ranks of which one is killed, and what a load finds afterwards.

`import torch` costs seconds. So the ranks are forked from a server process that has imported it and has no threads yet
(the "forkserver" of multiprocessing), and so is the child process of the process checkpointer.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.launch import STOCK_WARNINGS

from .failpoints import BY_NAME, STAGES, KillingPlanner, Stage
from .saves import loaded, new_writer, values

WORLD_SIZE = 2
ATTEMPTS = 3
LIMIT_SECONDS = 60.0
# the second is what a DTensor imports when it is made
PRELOADED = ["torch.distributed.checkpoint", "torch._dynamo", "fsspec.implementations.local", __name__]


@dataclass(frozen=True)
class Case:
    """One killed save.

    Attributes:
        writer: "ours" or "stock".
        how: "sync", or the "thread" or "process" of `dcp.async_save`.
        path: "fresh", with an earlier checkpoint elsewhere, or "overwrite".
        stage: name of a stage.
        victim: the rank that is killed.
    """

    writer: str
    how: str
    path: str
    stage: str
    victim: int

    def __str__(self) -> str:
        return "-".join([self.writer, self.how, self.path, self.stage.replace(" ", "_"), f"rank_{self.victim}"])


@dataclass(frozen=True)
class Killed:
    """How the ranks of a case ended.

    Attributes:
        checkpoint: where they saved.
        earlier: where the earlier checkpoint is; the same with "overwrite".
        errors: what the rank that was not killed raised, as text; empty where it came to its end. With the process
            checkpointer, which dies in the rank's place, of both ranks.
        seconds: how long it took until both had ended.
    """

    checkpoint: Path
    earlier: Path
    errors: dict[int, str]
    seconds: float


def cases(writer: str, how: str) -> list[Case]:
    """All cases of a writer and a way to save: every stage that it has, on every path that has it, for every rank."""

    def has(stage: Stage, path: str) -> bool:
        return getattr(stage, writer) is not None and (stage.fresh or path == "overwrite")

    paths = ("fresh", "overwrite")
    return [
        Case(writer, how, path, stage.name, victim)
        for stage in STAGES
        for path in paths
        if has(stage, path)
        for victim in range(WORLD_SIZE)
    ]


def _sharded(seed: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    state = values(seed)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
    return state


# --- a rank -------------------------------------------------------------------------------------------------------


def _rank(case: Case | None, writer: str, directory: Path, checkpoint: Path, rank: int) -> None:
    """A rank's process. Without a case it saves the earlier checkpoint."""
    log = os.open(directory / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    checkpointer = _StandIn() if case is not None and case.how == "process" else None
    if checkpointer is not None:
        torch.multiprocessing.get_context = lambda method=None: checkpointer
    told = ""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory / 'meeting'}",
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=LIMIT_SECONDS / 2),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in STOCK_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            if case is None:
                dcp.save(_sharded("old"), storage_writer=new_writer(writer, checkpoint))
            else:
                _save_killed(case, directory, checkpoint)
    except BaseException:
        told = traceback.format_exc()
    if checkpointer is not None:
        checkpointer.process.join(5.0 if rank == case.victim else 0.0)
        (directory / f"checkpointer-{rank}").write_text(str(checkpointer.process.exitcode))
        checkpointer.process.kill()
    (directory / f"told-{rank}.part").write_text(told)
    (directory / f"told-{rank}.part").rename(directory / f"told-{rank}")
    os._exit(0)  # no process group is torn down, no checkpointer waited for


class _StandIn:
    """A process forked early, before there are threads, that becomes the process checkpointer's once that is started.

    It takes the place of the context that starts processes anew, which would import torch again.
    """

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self) -> None:
        self._connection, other_end = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._stand_by, args=(other_end,))
        self.process.start()
        other_end.close()

    def _stand_by(self, connection: Any) -> None:
        self._connection.close()
        target, arguments = connection.recv()
        target(*arguments)

    def Process(self, *, target: Any, args: tuple[Any, ...], daemon: bool) -> _StandIn:  # noqa: N802
        self._work = (target, args)
        return self

    def start(self) -> None:
        self._connection.send(self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)


def _save_killed(case: Case, directory: Path, checkpoint: Path) -> None:
    state, writer = _sharded("new"), new_writer(case.writer, checkpoint)
    planner = KillingPlanner(case.stage, case.writer, case.victim, directory)
    if case.how == "sync":
        dcp.save(state, storage_writer=writer, planner=planner)
        return
    kind = AsyncCheckpointerType.THREAD if case.how == "thread" else AsyncCheckpointerType.PROCESS
    future: Any = dcp.async_save(state, storage_writer=writer, planner=planner, async_checkpointer_type=kind)
    for value in state.values():  # training goes on
        if not isinstance(value, str):
            value.to_local().fill_(-1)
    future.result(timeout=LIMIT_SECONDS / 2)


# --- the test's process -------------------------------------------------------------------------------------------


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run_ranks(case: Case | None, writer: str, directory: Path, checkpoint: Path) -> list[int | None]:
    """Start the ranks and wait for them; their exit codes."""
    context = _context()
    ranks = [
        context.Process(target=_rank, args=(case, writer, directory, checkpoint, rank)) for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    exit_codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return exit_codes


def _logs(directory: Path) -> str:
    paths = [*sorted(directory.glob("told-*")), *sorted(directory.glob("log-*"))]
    return "\n".join(f"--- {path.name}:\n{path.read_text()}" for path in paths)


def save_earlier(writer: str, directory: Path) -> Path:
    """Save the earlier checkpoint, by two ranks that come to their end."""
    for attempt in range(ATTEMPTS):
        place = directory / f"{writer}-{attempt}"
        place.mkdir(parents=True)
        exit_codes = _run_ranks(None, writer, place, place / "c")
        if exit_codes == [0, 0] and not any((place / f"told-{rank}").read_text() for rank in range(WORLD_SIZE)):
            assert loaded(writer, place / "c") == "old"
            return place / "c"
    raise AssertionError(f"The ranks could not save at all: {_logs(place)}")


def run_case(case: Case, earlier: Path, directory: Path) -> Killed:
    """Let two ranks save and kill one of them.

    Args:
        case: which and where.
        earlier: an earlier checkpoint; it is copied.
        directory: an empty directory.

    Returns:
        How they ended.

    Raises:
        AssertionError: the stage was not reached, the victim did not die of SIGKILL, or the other rank did not end.
    """
    for attempt in range(ATTEMPTS):  # gloo sometimes fails to connect local ranks: then no save has begun
        place = directory / f"attempt-{attempt}"
        place.mkdir(parents=True)
        kept = place / "kept"
        checkpoint = kept if case.path == "overwrite" else place / "new"
        shutil.copytree(earlier, kept)
        start = time.monotonic()
        exit_codes = _run_ranks(case, case.writer, place, checkpoint)
        seconds = time.monotonic() - start
        if (place / "pid-0").exists() and (place / "pid-1").exists():
            break
    _assert_killed(case, place, exit_codes)
    told = {rank: (place / f"told-{rank}") for rank in range(WORLD_SIZE)}
    return Killed(checkpoint, kept, {rank: path.read_text() for rank, path in told.items() if path.exists()}, seconds)


def _assert_killed(case: Case, place: Path, exit_codes: list[int | None]) -> None:
    fired = place / "fired"
    assert fired.exists(), f"{case}: the stage was never reached. {exit_codes} {_logs(place)}"
    victim = (place / f"pid-{case.victim}").read_text()
    assert fired.read_text() == f"{case.stage}\n{victim}"
    if case.how == "process":
        exit_codes = [*exit_codes]
        assert exit_codes == [0, 0], f"{case}: {exit_codes} {_logs(place)}"
        exit_codes[case.victim] = int((place / f"checkpointer-{case.victim}").read_text())
    assert exit_codes[case.victim] == -signal.SIGKILL, f"{case}: {exit_codes} {_logs(place)}"
    assert exit_codes[1 - case.victim] == 0, f"{case}: the other rank hangs: {exit_codes} {_logs(place)}"


def outcome(case: Case, killed: Killed) -> str:
    """One word for what is left.

    Returns:
        "old": the earlier checkpoint loads, and what was being saved is not there. "new": what was being saved loads;
        on a fresh path the earlier one does too. "mixed": one load returns parts of both. "lost": nothing can be
        loaded where there was a checkpoint, or what can't be loaded is not reported as missing. "wrong": values that
        nobody saved.
    """
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
    """What must be left of a case of ours."""
    return "new" if BY_NAME[case.stage].published or _other_rank_goes_on(case) else "old"


def may_succeed(case: Case) -> bool:
    """Whether the rank that is not killed may come to its end: it has published, and all it missed is to say so."""
    return _other_rank_goes_on(case)
