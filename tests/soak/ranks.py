"""Forked processes as ranks. The parent never starts a thread or uses torch, so forking it is safe at any time."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.distributed.launch import STOCK_WARNINGS

FORK = multiprocessing.get_context("fork")
GLOO_SECONDS = 60.0
GLOO_SECONDS_OF_SURVIVORS = 8.0  # gloo notices the death of a rank at once only where it talks to it
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank."""

    value: Any = None  # what it returned
    error: BaseException | None = None  # what it raised; None where it returned or was killed
    trace: str = ""  # its traceback
    killed: bool = False  # whether it was killed


@dataclass
class Job:
    """Ranks that do one thing together."""

    # what each rank calls; it finds the process group set up, if there is more than one rank
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # of the function
    world_size: int = 1  # how many ranks
    kill_after_seconds: float | None = None  # when one of them is killed; None: never
    victim: int = 0  # the rank that is killed
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class Hang(AssertionError):
    """A rank did not end in time."""


class Unmet(Exception):
    """The ranks could not connect to each other, as gloo fails to do now and then: nothing was saved or loaded."""


def run_jobs(*jobs: Job) -> list[list[Outcome]]:
    """Run all jobs at the same time; the outcomes of each, in the order of its ranks."""
    with tempfile.TemporaryDirectory() as directory:
        started = time.monotonic()
        running: dict[Any, tuple[Job, int, Any]] = {}
        for number, job in enumerate(jobs):
            for rank in range(job.world_size):
                receiving, sending = FORK.Pipe(duplex=False)
                meeting = Path(directory) / f"job-{number}"
                process = FORK.Process(target=_serve, args=(sending, job, rank, meeting))
                process.start()
                sending.close()
                running[receiving] = (job, rank, process)
        try:
            _gather(running, started)
        finally:
            for _, _, process in running.values():
                process.kill()
                process.join()
    for job in jobs:
        if any(isinstance(outcome.error, Unmet) for outcome in job.outcomes.values()):
            raise Unmet
    return [[job.outcomes[rank] for rank in range(job.world_size)] for job in jobs]


def _gather(running: dict[Any, tuple[Job, int, Any]], started: float) -> None:
    waiting, doomed = dict(running), [entry for entry in running.values() if _is_doomed(*entry[:2])]
    while waiting:
        age = time.monotonic() - started
        for job, rank, process in list(doomed):
            assert job.kill_after_seconds is not None
            if age >= job.kill_after_seconds:
                process.kill()
                doomed.remove((job, rank, process))
        if age > LIMIT_SECONDS:
            for _, _, process in waiting.values():
                os.kill(process.pid, signal.SIGUSR1)  # they say where they stand
            time.sleep(1.0)
            raise Hang(f"ranks {[rank for _, rank, _ in waiting.values()]} did not end in {LIMIT_SECONDS} s")
        delays = [job.kill_after_seconds - age for job, _, _ in doomed if job.kill_after_seconds is not None]
        for connection in multiprocessing.connection.wait(list(waiting), timeout=max(0.0, min([1.0, *delays]))):
            job, rank, process = waiting.pop(connection)
            doomed = [entry for entry in doomed if entry[2] is not process]
            try:
                job.outcomes[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                process.join()
                if process.exitcode != -signal.SIGKILL:
                    raise Hang(f"rank {rank} ended with {process.exitcode}") from None
                job.outcomes[rank] = Outcome(killed=True)


def _is_doomed(job: Job, rank: int) -> bool:
    return job.kill_after_seconds is not None and rank == job.victim


def _serve(connection: Any, job: Job, rank: int, meeting: Path) -> None:
    import torch

    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    logging.disable()  # DCP logs each failure, and here most are wanted
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    for message in STOCK_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    try:
        if job.world_size > 1:
            _meet(job, rank, meeting)
        outcome = Outcome(job.function(*job.arguments))
    except BaseException as error:
        outcome = Outcome(error=error, trace=traceback.format_exc())
    try:
        payload = pickle.dumps(outcome)
    except Exception:
        payload = pickle.dumps(Outcome(error=RuntimeError(repr(outcome.error)), trace=outcome.trace))
    connection.send_bytes(payload)
    os._exit(0)  # whatever threads there are: nothing of this process is needed any more


def _meet(job: Job, rank: int, meeting: Path) -> None:
    import torch.distributed as dist

    doomed = job.kill_after_seconds is not None
    timeout = timedelta(seconds=GLOO_SECONDS_OF_SURVIVORS if doomed else GLOO_SECONDS)
    method = f"file://{meeting}"
    try:
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=job.world_size, timeout=timeout)
    except Exception as error:
        if not doomed:  # else the other one may be dead already
            raise Unmet from error
        raise


def errors_of(outcomes: Sequence[Outcome]) -> list[BaseException]:
    """What ranks raised."""
    return [outcome.error for outcome in outcomes if outcome.error is not None]
