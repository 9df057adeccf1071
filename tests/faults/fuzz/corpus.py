"""The inputs kept in git, `corpus/<target>/<hash>`: what was once a finding, and few that reach all lines together."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["CORPUS", "corpus_files", "keep_finding", "keep_new_lines"]

CORPUS = Path(__file__).parent / "corpus"
# What a fuzzer finds may be long; of two inputs that reach the same lines the shorter one is kept.
MAX_KEPT_NBYTES = 4096

_Arc = tuple[str, int, int]


def corpus_files(target: str) -> list[Path]:
    """The inputs of a target, sorted by name."""
    return sorted(path for path in (CORPUS / target).glob("*") if path.is_file())


def keep_finding(target: str, data: bytes) -> Path:
    """Save an input that a target failed on. It is never thrown away."""
    return _write(target, "finding-", data)


def keep_new_lines(target: str, run: Callable[[bytes], None], inputs: Iterable[bytes]) -> int:
    """Of all inputs, keep the shortest that reach every pair of lines that any of them reaches.

    Returns:
        How many are kept beside the findings.
    """
    seen: set[_Arc] = set()
    kept: list[bytes] = []
    for path in corpus_files(target):
        if path.name.startswith("finding-"):
            seen |= _arcs(run, path.read_bytes())
        else:
            kept.append(path.read_bytes())
            path.unlink()
    small = {data for data in (*inputs, *kept) if len(data) <= MAX_KEPT_NBYTES}
    count = 0
    for data in sorted(small, key=lambda data: (len(data), data)):
        reached = _arcs(run, data)
        if reached - seen:
            seen |= reached
            _write(target, "", data)
            count += 1
    return count


def _write(target: str, prefix: str, data: bytes) -> Path:
    path = CORPUS / target / (prefix + hashlib.sha256(data).hexdigest()[:16])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _arcs(run: Callable[[bytes], None], data: bytes) -> set[_Arc]:
    """The steps from line to line that an input makes in the package."""
    found: set[_Arc] = set()

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "dcp_nvcomp" not in name:
            return None
        last = 0

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            found.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        with contextlib.suppress(Exception):
            run(data)
    finally:
        sys.settrace(None)
    return found
