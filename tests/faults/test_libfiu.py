"""System calls that fail at random in a child process, below Python: by libfiu (Debian: libfiu0, fiu-utils).

Its preload library stands between Python and libc. It covers open, write, fsync, unlink, rename, pread and preadv, but
not openat, mkdir, link, stat or getdents: those fail in test_every_call.py only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 40

SAVE_POINTS = (
    "posix/io/rw/write",
    "posix/io/sync/fsync",
    "posix/io/oc/open",
    "posix/io/dir/rename",
    "posix/io/dir/unlink",
)
SHORT_POINTS = ("posix/io/rw/write/reduce", "posix/io/rw/pread/reduce", "posix/io/rw/preadv/reduce")
LOAD_POINTS = ("posix/io/rw/pread", "posix/io/rw/preadv", "posix/io/oc/open")


def run_child(folder: Path, points: tuple[str, ...], number: str, probability: float) -> list[dict[str, Any]]:
    if shutil.which("fiu-run") is None:
        pytest.skip("fiu-run is not installed (Debian: apt-get install libfiu0 fiu-utils)")
    command = ["fiu-run", "-x", "-f", "", sys.executable, "-m", "tests.faults.libfiu_child", str(folder), str(ROUNDS)]
    command += [number, str(probability), *points]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == ROUNDS
    return rounds


@pytest.mark.ci
@pytest.mark.parametrize(
    "number", ["EDQUOT", *(pytest.param(other, marks=pytest.mark.slow) for other in ("ENOSPC", "EIO"))]
)
def test_saves(tmp_path: Path, number: str) -> None:
    """The old checkpoint or the new one loads, and an error is one of ours."""
    rounds = run_child(tmp_path, SAVE_POINTS, number, 0.04)
    for one in rounds:
        # several calls may fail in one save: also the look whether it was published
        assert one["loads"] in (("old", "new") if one["error"] else ("new",)), one
        if one["error"]:
            assert one["error"] == "StorageError" and one["errno"] == number, one
    kinds = Counter(bool(one["error"]) for one in rounds)
    assert min(kinds[True], kinds[False]) >= 3, f"some of both, or it proves nothing: {kinds}"


def test_short_reads_and_writes(tmp_path: Path) -> None:
    for one in run_child(tmp_path, SHORT_POINTS, "EIO", 0.5):
        assert (one["error"], one["loads"]) == (None, "new"), one


@pytest.mark.slow
def test_loads(tmp_path: Path) -> None:
    rounds = run_child(tmp_path, ("load", *LOAD_POINTS), "EIO", 0.08)
    for one in rounds:
        assert one["loads"] == "old", one
        assert one["error"] in (None, "StorageError", "AssertionError"), one
        assert one["error"] != "AssertionError" or "metadata read failed" in one["text"], one
    kinds = Counter(bool(one["error"]) for one in rounds)
    assert min(kinds[True], kinds[False]) >= 3, kinds
