"""Runs the steps, each in processes of its own, and goes on after whatever fails. Writes the JSON after every probe."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_acceptance import child
from benchmarks.gpu_acceptance.results import checks_of, plain, tables_of
from benchmarks.gpu_acceptance.steps import Step

__all__ = ["FILE_NAME", "Runner"]

FILE_NAME = "gpu-acceptance.json"

# Nobody waits for the stand-in, and its machine may be busy with other tests.
_STAND_IN_SLACK = 4.0

# A step that would have less time than this is not begun.
_LEAST_SECONDS = 5.0
_GRACE_SECONDS = 5.0
_TAIL_CHARACTERS = 12_000

# Processes are forks of one that has imported what takes seconds to import, and nothing that touches the GPU.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.gpu_acceptance.preload"])


class Runner:
    """One acceptance run.

    Args:
        out: the folder that receives the JSON file.
        facts: what is known of the machine and the run.
        stand_in: True to run on the CPU.
        seconds: the time for all steps together.
        say: called with each event.
    """

    def __init__(
        self, out: Path, facts: dict[str, Any], *, stand_in: bool, seconds: float, say: Callable[[str], None]
    ) -> None:
        self._path = out / FILE_NAME
        self._stand_in = stand_in
        self._slack = _STAND_IN_SLACK if stand_in else 1.0
        self._deadline = time.monotonic() + seconds
        self._say = say
        self.result: dict[str, Any] = {
            "suite": "gpu-acceptance",
            "stand_in": stand_in,
            "complete": False,
            "quick": stand_in,
            **facts,
            "steps": {},
            "tables": {},
            "checks": [],
            "notes": [],
        }

    def run(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Run all steps; returns what is in the JSON file."""
        for step in steps:
            self.result["steps"][step.name] = {"about": step.about, "status": "not run", "probes": {}}
        self._write()
        _import_all(max(0.0, self._deadline - time.monotonic()))
        for step in steps:
            self._run_step(step, self.result["steps"][step.name])
        self.result["complete"] = True
        self._write()
        return self.result

    def _write(self) -> None:
        self.result["tables"] = tables = tables_of(self.result["steps"])
        self.result["checks"] = checks_of(tables)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1, default=plain) + "\n")
        partial.replace(self._path)

    def _run_step(self, step: Step, found: dict[str, Any]) -> None:
        """Run a step in as many processes as it takes."""
        began = time.monotonic()
        deadline = min(began + step.seconds * self._slack, self._deadline)
        if deadline - began < _LEAST_SECONDS:
            found |= {"status": "skipped", "reason": "no time was left for it"}
            self._write()
            return
        self._say(f"{step.name}: {step.about}")
        progress = _Progress(found["probes"], self._say)
        ending: str | None = None
        before = -1
        # a process that has begun nothing new would only be followed by another like it
        while before < len(progress.begun) and progress.is_left() and time.monotonic() < deadline - 1:
            before = len(progress.begun)
            ending = self._run_process(step, progress, found, deadline)
        if progress.is_left() and ending is None:
            ending = "the time of the step was up"
        status = "observed" if step.may_fail else _status(found["probes"], ending)
        found |= {"status": status, "seconds": round(time.monotonic() - began, 1)}
        if ending is not None:
            found["reason"] = ending
        self._say(f"{step.name}: {found['status']} in {found['seconds']} s{_why(found)}")
        self._write()

    def _run_process(self, step: Step, progress: _Progress, found: dict[str, Any], deadline: float) -> str | None:
        """Run one process of a step; returns why it did not run all probes that were left, None if it did."""
        timed_out, probe_seconds = False, step.probe_seconds * self._slack
        with tempfile.NamedTemporaryFile(prefix="dcp-nvcomp-acceptance-") as log:
            pipe, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=child.main, args=(theirs, Path(log.name), step, self._stand_in, list(progress.begun))
            )
            process.start()
            theirs.close()
            with pipe:
                try:
                    for line in _lines(pipe, lambda: min(deadline, time.monotonic() + probe_seconds)):
                        self.result |= line.get("found", {}).pop("facts", {})
                        progress.take(line)
                        self._write()
                except TimeoutError:
                    timed_out = True
            code = _end(process, 0 if timed_out else _GRACE_SECONDS)
            tail = _tail(log)
        if timed_out:
            ending = "the time of the step was up" if time.monotonic() >= deadline else "a probe took too long"
        else:
            ending = progress.ending(code)
        progress.stopped("timed out" if timed_out else "crashed", ending)
        if tail:
            found["output"] = (found.get("output", "") + tail)[-_TAIL_CHARACTERS:]
        self._write()
        return ending


def _import_all(seconds: float) -> None:
    """Start the process that all others are forks of: importing everything must not count as a step's time."""
    process = _CONTEXT.Process(target=time.time)
    process.start()
    process.join(seconds)


class _Progress:
    """Reports of the processes of a step.

    Args:
        probes: receives what is known of each probe.
        say: called with each event.

    Attributes:
        begun: the names of the probes that were begun, in this order.
    """

    def __init__(self, probes: dict[str, Any], say: Callable[[str], None]) -> None:
        self._probes = probes
        self._say = say
        self._has_names = False
        self._running: str | None = None
        self._finished: str | None = "not finished"
        self.begun: list[str] = []

    def is_left(self) -> bool:
        """True if there are probes to run, or nothing is known of them yet."""
        return not self._has_names or any(probe["status"] == "not run" for probe in self._probes.values())

    def take(self, line: dict[str, Any]) -> None:
        """Take in what a process sent; see `child`."""
        if "names" in line:
            self._has_names = True
            for name in line["names"]:
                self._probes.setdefault(name, {"status": "not run"})
        elif "begin" in line:
            self._running = line["begin"]
            self.begun.append(line["begin"])
            self._probes[line["begin"]] = {"status": "running"}
        elif "end" in line:
            self._running = None
            self._probes[line["end"]] = found = line["found"]
            self._say(f"  {line['end']}: {found['status']}{_why(found)}")
        elif "finished" in line:
            self._finished = line["finished"]

    def ending(self, code: int) -> str | None:
        """Return why the process that has just ended left probes; None if it did not, and ended well."""
        if code == 0 and self._finished != "not finished":
            return self._finished
        return f"the process ended by {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"

    def stopped(self, status: str, reason: str | None) -> None:
        """The process is gone. Whatever probe it was running gets this status."""
        if self._running is not None:
            self._probes[self._running] = {"status": status, "reason": reason}
            self._say(f"  {self._running}: {status} ({reason})")
        self._running, self._finished = None, "not finished"


def _lines(pipe: Connection, deadline_now: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yield what a process sends until it has finished, or is gone.

    Raises:
        TimeoutError: nothing came until the deadline, which is asked for again after each line.
    """
    line: dict[str, Any] = {}
    while "finished" not in line:
        if not pipe.poll(max(0.0, deadline_now() - time.monotonic())):
            raise TimeoutError
        try:
            line = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # it is gone, perhaps in the middle of a line
            return
        yield line


def _end(process: BaseProcess, patience_seconds: float) -> int:
    """Wait for a process to end itself; after so long end it and its children. Returns its exit status."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.join(patience_seconds)
        if process.exitcode is not None:
            return process.exitcode
        assert process.pid is not None
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # it has not yet begun
            os.kill(process.pid, number)
        patience_seconds = _GRACE_SECONDS
    process.join(_GRACE_SECONDS)
    # one that hangs inside the driver can't be ended even so; the next one finds out what that means for the GPU
    return -signal.SIGKILL if process.exitcode is None else process.exitcode


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _TAIL_CHARACTERS))
    return log.read().decode(errors="replace")


def _why(found: Mapping[str, Any]) -> str:
    reason = found.get("error") or found.get("reason") or ""
    return f" ({reason.splitlines()[0][:200]})" if reason else ""


def _status(probes: Mapping[str, Mapping[str, Any]], ending: str | None) -> str:
    statuses = {probe["status"] for probe in probes.values()}
    if ending is None and statuses == {"skipped"}:
        return "skipped"
    return "passed" if ending is None and statuses and statuses <= {"passed", "skipped"} else "failed"
