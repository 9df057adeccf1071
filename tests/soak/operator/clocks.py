"""Clocks that are wrong: libfaketime, loaded before Python, gives each process a time of day of its own."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path


def load_faketime() -> None:
    """Start this program again with libfaketime, where it is installed and not loaded yet.

    Monotonic clocks stay as they are, and so do the times of files, which are those of the file server.
    """
    if can_set_clocks():
        # Python sleeps until a time, and libfaketime calls that invalid if it is over by then
        time.sleep = _sleep  # type: ignore[assignment]
        return
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        print("soak: no libfaketime is installed, so all clocks are right", flush=True)
        return
    changes = {"LD_PRELOAD": str(library), "FAKETIME": "+0", "FAKETIME_NO_CACHE": "1"}
    environment = {**os.environ, **changes, "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "tests.soak", *sys.argv[1:]], environment)


def _sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


def can_set_clocks() -> bool:
    """Return whether the clocks of this process can be set."""
    return "libfaketime" in os.environ.get("LD_PRELOAD", "")


def set_clock(seconds: int) -> None:
    """Let the time of day of this process be off by so much, where it can be set."""
    os.environ["FAKETIME"] = f"{seconds:+d}"
