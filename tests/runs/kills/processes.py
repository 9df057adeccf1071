"""Ranks that may be killed, any number of them, forked from a server that has imported torch (tests/faults/forked.py).

When one of them dies the others are killed after a short grace, as torchrun does. What a rank that is to die leaves
behind is the file `fired`; only where that is there are the others killed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.launch import STOCK_WARNINGS
from tests.faults.forked import PRELOADED

LIMIT_SECONDS = 120.0  # ends what hangs
GRACE_SECONDS = 0.4  # how long the others go on after the first death
MEETINGS = 4  # gloo sometimes fails to connect the ranks of a busy machine

FIRED = "fired"


@dataclass(frozen=True)
class End:
    """The end of one rank."""

    has_met: bool  # False if the ranks could not connect, so that none of them began
    exit_code: int | None  # of its process
    hung: bool  # True if it had to be killed although nobody had died
    error: str | None  # the traceback of what its function raised; None where it did not come that far
    value: Any  # what its function returned
    log: str  # what it printed


def run(function: Callable[..., Any], *arguments: Any, world_size: int, directory: Path) -> list[End]:
    """Run `function(*arguments, where)` on each rank, `where` being the directory for its `strike`."""
    for meeting in range(MEETINGS):
        ends = _run_once(function, arguments, world_size, directory / f"meeting-{meeting}")
        if any(end.has_met for end in ends):
            break
    return ends


def strike(where: Path, victims: Sequence[int]) -> None:
    """Kill ranks, this one last if it is among them; only the first call does."""
    try:
        (where / FIRED).touch(exist_ok=False)
    except FileExistsError:
        return
    pids = [int((where / f"pid-{victim}").read_text()) for victim in victims]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _run_once(function: Callable[..., Any], arguments: tuple[Any, ...], world_size: int, where: Path) -> list[End]:
    where.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__, function.__module__])
    ranks = [
        context.Process(target=_rank, args=(function, arguments, where, rank, world_size)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    hung = _wait(ranks, where)
    return [_end_of(where, rank, process.exitcode, rank in hung) for rank, process in enumerate(ranks)]


def _wait(ranks: Sequence[multiprocessing.process.BaseProcess], where: Path) -> set[int]:
    """Wait until all have ended, or one was killed and the grace is over; return the ranks that hung."""
    deadline = time.monotonic() + LIMIT_SECONDS
    has_fired = False
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
        if not has_fired and (where / FIRED).exists():
            has_fired, deadline = True, time.monotonic() + GRACE_SECONDS
        multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], timeout=0.02)
    alive = {rank for rank, process in enumerate(ranks) if process.is_alive()}
    for rank in alive:
        ranks[rank].kill()
        ranks[rank].join()
    return set() if has_fired else alive


def _end_of(where: Path, rank: int, exit_code: int | None, hung: bool) -> End:
    told, log = where / f"told-{rank}", where / f"log-{rank}"
    # without a word it was killed, in the function
    has_met, error, value = pickle.loads(told.read_bytes()) if told.exists() else (True, None, None)
    return End(has_met, exit_code, hung, error, value, log.read_text() if log.exists() else "")


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...], where: Path, rank: int, world_size: int) -> None:
    log = os.open(where / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(0.8 * LIMIT_SECONDS)
    # The loopback interface is the only one that every machine has.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    (where / f"pid-{rank}").write_text(str(os.getpid()))
    has_met, error, value = False, "", None
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{where / 'meeting'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=LIMIT_SECONDS),
        )
        dist.barrier()
        has_met = True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in STOCK_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            value = function(*arguments, where)
    except BaseException:
        error = traceback.format_exc()
    part = where / f"told-{rank}.part"
    part.write_bytes(pickle.dumps((has_met, error, value)))
    part.rename(where / f"told-{rank}")
    os._exit(0)  # no process group is torn down
