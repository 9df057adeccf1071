"""The inputs kept in git, `<target>/<hash>` in corpus.zip: what was once a finding, and few that reach all lines."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).with_name("corpus.zip")
# What a fuzzer finds may be long; of two inputs that reach the same lines the shorter one is kept.
MAX_KEPT_NBYTES = 4096
_FINDING = "finding-"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same inputs make the same archive

_Arc = tuple[str, int, int]


def corpus_inputs(target: str) -> dict[str, bytes]:
    """Return the inputs of a target by name, sorted."""
    return {name.partition("/")[2]: data for name, data in _read().items() if name.startswith(f"{target}/")}


def keep_finding(target: str, data: bytes) -> str:
    """Keep an input that a target failed on, for ever, and return its name."""
    name = f"{target}/{_FINDING}{_digest(data)}"
    _write({**_read(), name: data})
    return name


def keep_new_lines(target: str, run: Callable[[bytes], None], inputs: Iterable[bytes]) -> int:
    """Keep the shortest inputs that reach each pair of lines that any reaches; return how many, beside findings."""
    seen: set[_Arc] = set()
    kept: list[bytes] = []
    entries = _read()
    for name, data in corpus_inputs(target).items():
        if name.startswith(_FINDING):
            seen |= _arcs(run, data)
        else:
            kept.append(entries.pop(f"{target}/{name}"))
    small = {data for data in (*inputs, *kept) if len(data) <= MAX_KEPT_NBYTES}
    count = 0
    for data in sorted(small, key=lambda data: (len(data), data)):
        reached = _arcs(run, data)
        if reached - seen:
            seen |= reached
            entries[f"{target}/{_digest(data)}"] = data
            count += 1
    _write(entries)
    return count


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _read() -> dict[str, bytes]:
    with zipfile.ZipFile(CORPUS) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write(entries: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(CORPUS, "w") as archive:
        for name in sorted(entries):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), entries[name], zipfile.ZIP_DEFLATED)


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
