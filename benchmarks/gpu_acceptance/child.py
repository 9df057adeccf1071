"""A process of a step: runs its probes one after the other, and reports each to the runner as a line of JSON.

{"names": [...]}                                  once, before all probes
{"begin": name}                                   a probe begins
{"end": name, "found": {"status": ..., ...}}      and has ended: "passed", "failed" or "skipped", with what it found
{"finished": reason}                              no more probes here: None if all were run

A GPU that can't be used any more ends the process; the runner starts another one for the probes that are left.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import ROOT, Host
from benchmarks.gpu_acceptance.results import Skipped, plain
from benchmarks.gpu_acceptance.steps import Step
from benchmarks.processes import quiet

__all__ = ["Report", "main"]

_LONGEST_ERROR = 4000


class Report:
    """The pipe to the runner.

    Args:
        pipe: receives the lines.
        done: names of probes that earlier processes of the step have begun.
        trouble: returns what is wrong if the GPU can't be used any more.
    """

    def __init__(self, pipe: Connection, done: frozenset[str], trouble: Callable[[], str | None]) -> None:
        self._pipe = pipe
        self._trouble = trouble
        self.done = done

    def send(self, **line: Any) -> None:
        self._pipe.send_bytes(json.dumps(line, default=plain).encode())

    def run(self, name: str, work: Callable[[], Mapping[str, Any] | None]) -> str | None:
        """Run one probe and report what comes of it, whatever it raises; returns the GPU's trouble after it."""
        self.send(begin=name)
        start = time.perf_counter()
        try:
            found = {"status": "passed", **(work() or {})}
        except Skipped as reason:
            found = {"status": "skipped", "reason": str(reason)}
        except BaseException as error:
            trace = traceback.format_exc()[-_LONGEST_ERROR:]
            found = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR], "trace": trace}
        return self.end(name, found, time.perf_counter() - start)

    def end(self, name: str, found: dict[str, Any], seconds: float) -> str | None:
        """Report what came of a probe; returns the GPU's trouble after it."""
        trouble = self._trouble()
        if trouble is not None:
            found = {"error": trouble} | found | {"status": "failed", "trouble": trouble}
        self.send(end=name, found={**found, "seconds": round(seconds, 3)})
        return trouble


def main(pipe: Connection, log: Path, step: Step, stand_in: bool, done: Sequence[str]) -> None:
    """Run the probes of a step, as the main function of a process.

    Args:
        pipe: to the runner.
        log: file that receives what is printed.
        step: the step.
        stand_in: True to run on the CPU.
        done: names of probes that earlier processes of the step have begun.
    """
    os.setsid()  # so that the runner can end the process together with its children
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    os.chdir(ROOT)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(sys.__stderr__ or 2)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    quiet()
    if stand_in:  # which works in many small steps, in which torch's threads would only wait for each other
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    host = Host(stand_in)
    report = Report(pipe, frozenset(done), host.trouble)
    report.send(finished=_run(step, host, report))


def _end_with_the_runner() -> None:
    """Wait for the runner's end, and do not stay behind on the GPU."""
    runner = multiprocessing.parent_process()
    assert runner is not None
    wait([runner.sentinel])
    os.killpg(0, signal.SIGKILL)


def _run(step: Step, host: Host, report: Report) -> str | None:
    """Run the probes that are left; returns the reason if some still are."""
    module = importlib.import_module(step.module)
    if hasattr(module, "run"):  # finds its probes in a way of its own
        reason: str | None = module.run(host, report)
        return reason
    probes = list(module.probes(host))
    report.send(names=[name for name, _ in probes])
    left = [(name, work) for name, work in probes if name not in report.done]
    for number, (name, work) in enumerate(left):
        trouble = report.run(name, work)
        if trouble is not None:
            return f"the GPU can't be used any more: {trouble}"
        if step.alone and number + 1 < len(left):
            return "each probe has a process of its own"
    return None
