"""Processes that may be killed: ranks of a gloo process group that live for one call, and programs.

`import torch` costs seconds. So the ranks are forked from a server process that has imported it and has no threads yet
(the "forkserver" of multiprocessing), and so is the child process of the process checkpointer. The pool of
tests/distributed/launch.py serves more ranks, but nothing may die there or stay changed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.launch import STOCK_WARNINGS

WORLD_SIZE = 2
FIRED = "fired"  # in the directory of a call: a rank was killed, and the others have `GRACE_SECONDS` left
GRACE_SECONDS = 0.4
LIMIT_SECONDS = 240.0  # ends what hangs
GROUP_SECONDS = 60.0  # for what waits for a rank that died
MEETINGS = 4  # gloo sometimes fails to connect the ranks of a busy machine
# the third is what a DTensor imports when it is made
PRELOADED = ["dcp_nvcomp", "torch.distributed.checkpoint", "torch._dynamo", "fsspec.implementations.local", __name__]


@dataclass(frozen=True)
class End:
    """The end of one rank."""

    has_met: bool  # False if the ranks could not connect, so that none of them began
    exit_code: int | None  # of its process; None where it hung and was killed for it
    error: str | None  # the traceback of what its function raised; None where it did not come that far
    value: Any  # what its function returned
    checkpointer_exit_code: int | None  # of the process checkpointer; None where there was none, or it was still alive
    log: str  # what it printed


@dataclass(frozen=True)
class Finished:
    """The end of a program; like `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def execute(source: str, *arguments: str) -> Finished:
    """Run a program like `python -c SOURCE ARGUMENTS`, but with torch imported already."""
    return _finish(_run_source, (source,), ["-c", *arguments])


def execute_module(name: str, *arguments: str) -> Finished:
    """Run a module like `python -m NAME ARGUMENTS`, but with torch imported already."""
    return _finish(_run_module, (name,), [name, *arguments])


def _run_source(source: str) -> None:
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _finish(function: Callable[[str], None], given: tuple[str], argv: list[str]) -> Finished:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        streams = Path(directory, "stdout"), Path(directory, "stderr")
        process = context.Process(target=_program, args=(function, given, argv, *streams))
        process.start()
        process.join(LIMIT_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return Finished(process.exitcode, *(stream.read_text() if stream.exists() else "" for stream in streams))


def _program(function: Callable[[str], None], given: tuple[str], argv: list[str], stdout: Path, stderr: Path) -> None:
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = argv
    function(*given)


def run(
    function: Callable[..., Any],
    *arguments: Any,
    directory: Path,
    checkpointer: bool = False,
    lost: int | None = None,
    world_size: int = WORLD_SIZE,
    gets_directory: bool = False,
) -> list[End]:
    """Run `function(*arguments)` on each rank; `lost` is the one whose process checkpointer ends by itself.

    With `gets_directory` the directory of the call is the last argument: it has a file `pid-<rank>` for each rank.
    """
    for meeting in range(MEETINGS):
        where = directory / f"meeting-{meeting}"
        given = (*arguments, where) if gets_directory else arguments
        ends = _run_once(function, given, where, checkpointer, lost, world_size)
        if any(end.has_met for end in ends):
            break
    return ends


def _run_once(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    directory: Path,
    checkpointer: bool,
    lost: int | None,
    world_size: int,
) -> list[End]:
    directory.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, function.__module__])
    ranks = [
        context.Process(target=_rank, args=(function, arguments, directory, rank, checkpointer, lost, world_size))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline, has_fired = time.monotonic() + LIMIT_SECONDS, False
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
        if not has_fired and (directory / FIRED).exists():
            has_fired, deadline = True, time.monotonic() + GRACE_SECONDS
        multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], timeout=0.02)
    # one that was to be killed may not have come to that before the grace was over
    hung = [] if has_fired else [process for process in ranks if process.is_alive()]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return [_end_of(directory, rank, None if one in hung else one.exitcode) for rank, one in enumerate(ranks)]


def _end_of(directory: Path, rank: int, exit_code: int | None) -> End:
    told, log = directory / f"told-{rank}", directory / f"log-{rank}"
    # without a word it was killed, which the function does
    has_met, error, value, checkpointer = pickle.loads(told.read_bytes()) if told.exists() else (True, None, None, None)
    return End(has_met, exit_code, error, value, checkpointer, log.read_text() if log.exists() else "")


def _rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    directory: Path,
    rank: int,
    has_checkpointer: bool,
    lost: int | None,
    world_size: int,
) -> None:
    log = os.open(directory / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The loopback interface is the only one that every machine has.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.8 * LIMIT_SECONDS)
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    checkpointer = _StandIn() if has_checkpointer else None
    if checkpointer is not None:
        torch.multiprocessing.get_context = lambda method=None: checkpointer
    has_met, error, value, exit_code = False, "", None, None
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory / 'meeting'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
        dist.barrier()
        has_met = True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in STOCK_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            value = function(*arguments)
    except BaseException:
        error = traceback.format_exc()
    if checkpointer is not None:
        checkpointer.process.join(5.0 if rank == lost else 0.0)
        exit_code = checkpointer.process.exitcode
        checkpointer.process.kill()
    part = directory / f"told-{rank}.part"
    part.write_bytes(pickle.dumps((has_met, error, value, exit_code)))
    part.rename(directory / f"told-{rank}")
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
