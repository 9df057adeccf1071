"""Other processes: ranks of a process group, and children whose memory is watched from outside."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["Memory", "Ranks", "quiet", "watch"]

_CONTEXT = multiprocessing.get_context("spawn")
_SAMPLE_SECONDS = 0.002


def quiet() -> None:
    """Ignore what DCP warns of by design."""
    warnings.filterwarnings("ignore", message=r"torch\.distributed is (disabled|unavailable)")
    warnings.filterwarnings("ignore", message=r"Detected an existing checkpoint in")


class Ranks:
    """Processes that run functions as ranks of a gloo process group. A context manager.

    Args:
        count: how many; `run` may use fewer.
    """

    def __init__(self, count: int) -> None:
        self._workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0
        for _ in range(count):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on each rank; returns their results in rank order.

        Raises:
            RuntimeError: a rank raised; with its traceback.
        """
        self._calls += 1
        meeting = Path(self._directory.name) / f"meeting-{self._calls}"
        workers = self._workers[:world_size]
        for rank, (_, connection) in enumerate(workers):
            connection.send((rank, world_size, str(meeting), pickle.dumps((function, arguments))))
        results, failures = [], []
        for rank, (_, connection) in enumerate(workers):
            try:
                done, value = connection.recv()
            except EOFError:
                done, value = False, "died"
            (results if done else failures).append(value if done else f"--- rank {rank}: {value}")
        if failures:
            raise RuntimeError("\n".join(failures))
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process, connection in self._workers:
            connection.close()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()


def _serve(connection: multiprocessing.connection.Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    quiet()
    torch.set_num_threads(1)  # ranks share the cores
    while True:
        try:
            rank, world_size, meeting, call = connection.recv()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(call)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(minutes=20),
            )
            try:
                connection.send((True, function(*arguments)))
            finally:
                dist.destroy_process_group()
        except BaseException:
            connection.send((False, traceback.format_exc()))


@dataclass(frozen=True)
class Memory:
    """Memory of one phase of a child.

    Attributes:
        before_nbytes: resident before it.
        peak_nbytes: the most that was resident beyond that at any time, by the kernel's own account (VmHWM).
        anonymous_nbytes: the same of anonymous memory alone, sampled: without files that were mapped.
    """

    before_nbytes: int
    peak_nbytes: int
    anonymous_nbytes: int


Job = Callable[..., Generator[str, None, Any]]


def watch(job: Job, *arguments: Any) -> tuple[Any, dict[str, Memory]]:
    """Run a generator function in a process of its own, and watch its memory from here.

    Args:
        job: yields the name of each phase before it begins, and at last returns a result. A phase lasts until the
            next; one named "" is not watched. Memory that is free for reuse is given back before each.
        *arguments: for the job.

    Returns:
        The result, and what each phase took.

    Raises:
        RuntimeError: the job raised; with its traceback.
    """
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_run_job, args=(theirs, job, arguments))
    process.start()
    theirs.close()
    phases: dict[str, Memory] = {}
    observer = _Observer(process.pid)
    phase = ""
    try:
        while True:
            while not ours.poll(_SAMPLE_SECONDS):
                observer.sample()
            try:
                kind, value = ours.recv()
            except EOFError:
                raise RuntimeError(f"The watched process ended in phase {phase!r}.") from None
            if phase:
                phases[phase] = observer.end()
            if kind == "failed":
                raise RuntimeError(value)
            if kind == "done":
                return value, phases
            phase = value
            observer.begin()
            ours.send(None)
    finally:
        ours.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
            process.join()


class _Observer:
    """Reads another process's memory in /proc."""

    def __init__(self, pid: int | None) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._before = self._anonymous_before = self._anonymous_peak = 0

    def begin(self) -> None:
        (self._folder / "clear_refs").write_text("5")  # resets the kernel's peak
        status = self._status()
        self._before = status["VmRSS"]
        self._anonymous_before = self._anonymous_peak = status["RssAnon"]

    def sample(self) -> None:
        try:
            self._anonymous_peak = max(self._anonymous_peak, self._status()["RssAnon"])
        except (OSError, KeyError):  # it has ended; that is noticed elsewhere
            return

    def end(self) -> Memory:
        peak = self._status()["VmHWM"] - self._before
        return Memory(self._before, max(peak, 0), self._anonymous_peak - self._anonymous_before)

    def _status(self) -> dict[str, int]:
        fields = {}
        for line in (self._folder / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                fields[name] = int(value.split()[0]) * 1024
        return fields


def _run_job(connection: multiprocessing.connection.Connection, job: Job, arguments: tuple[Any, ...]) -> None:
    quiet()
    try:
        phases = job(*arguments)
        while True:
            name = next(phases)
            _give_back_free_memory()
            connection.send(("phase", name))
            connection.recv()
    except StopIteration as stop:
        connection.send(("done", stop.value))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


def _give_back_free_memory() -> None:
    """Or a phase takes what an earlier one left to malloc, and seems to need nothing."""
    import gc

    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
