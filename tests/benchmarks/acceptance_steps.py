"""A step of the acceptance run in which everything happens that can happen to a process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.results import Probe, Skipped


def probes(host: Host) -> Iterator[Probe]:
    yield "passes", lambda: {"found": 1, "rows": {"raw": [{"coder": "none"}]}}
    yield "raises", raise_
    yield "is skipped", skip
    yield "crashes", os.abort
    yield "ends the process", lambda: os._exit(0)
    yield "hangs", lambda: time.sleep(1000)
    yield "has a child that hangs", hang_in_a_child
    yield "passes at last", lambda: {"process": os.getpid()}


def raise_() -> None:
    raise ValueError("no such thing")


def skip() -> None:
    raise Skipped("there is none here")


def hang_in_a_child() -> None:
    if os.fork() == 0:
        time.sleep(1000)
    os.wait()
