"""Timing: cases that are compared alternate, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Case",
    "NotHere",
    "Settings",
    "Spread",
    "alternate",
    "available_nbytes",
    "core_count",
    "invocation",
    "machine",
    "paired",
    "versions",
]

_PACKAGES = (
    *("torch", "numpy", "zstandard", "crc32c", "fsspec", "s3fs", "boto3", "zipnn"),
    *("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12", "cupy-cuda13x", "cupy-cuda12x"),
)


class NotHere(Exception):
    """This machine lacks what a suite needs."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Settings:
    """Options of a run.

    Attributes:
        quick: a small state and one repeat: shows that the suite works, its figures mean nothing.
        repeats: how often each case is measured; None leaves it to the suite.
        nbytes: size of the state; None leaves it to the suite.
        directory: where checkpoints go; None means memory (/dev/shm) where there is such a thing.
        state: a safetensors file to take the state from; None means the one in tests/data.
        parts: which parts of a suite with several run; empty means all.
        s3: endpoint of an S3 server; None means the one in DCP_NVCOMP_TEST_S3.
        say: called with a description of what is being measured.
    """

    quick: bool = False
    repeats: int | None = None
    nbytes: int | None = None
    directory: Path | None = None
    state: Path | None = None
    parts: tuple[str, ...] = ()
    s3: str | None = None
    say: Callable[[str], None] = field(default=lambda text: None, repr=False)

    def repeats_or(self, usual: int) -> int:
        """Number of repeats of each case."""
        return self.repeats or (1 if self.quick else usual)

    def nbytes_or(self, usual: int, quick: int = 12 << 20) -> int:
        """Size of the state to measure with, in bytes."""
        return self.nbytes or (quick if self.quick else usual)

    def wants(self, part: str) -> bool:
        """True if this part of the suite is to run."""
        return not self.parts or part in self.parts

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory for checkpoints, removed afterwards."""
        memory = Path("/dev/shm")
        parent = self.directory or (memory if os.access(memory, os.W_OK) else None)
        with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-bench-", dir=parent) as name:
            yield Path(name)


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        run: what is timed.
        before: makes it ready, not timed.
        after: checks and removes what it left, not timed.
    """

    run: Callable[[], Any]
    before: Callable[[], Any] = _nothing
    after: Callable[[], Any] = _nothing


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing, in the order in which they were made."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def scaled(self, factor: float) -> Spread:
        """Each value times `factor`."""
        return Spread(tuple(value * factor for value in self.values))

    def rate(self, amount: float) -> Spread:
        """`amount` over each value: bytes over seconds."""
        return Spread(tuple(amount / value for value in self.values))

    def __add__(self, other: Spread) -> Spread:
        return Spread(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "values": list(self.values)}


def paired(numerator: Spread, denominator: Spread) -> Spread:
    """Quotients of the measurements of each repeat: what slowed the machine down in one repeat slowed down both."""
    return Spread(tuple(a / b for a, b in zip(numerator.values, denominator.values, strict=True)))


def alternate(cases: Mapping[str, Case], *, repeats: int, warmups: int = 1) -> dict[str, Spread]:
    """Seconds of each case.

    Args:
        cases: what to measure.
        repeats: how often; in each repeat every case runs once, and each repeat begins with another case.
        warmups: how often everything runs before, unmeasured: imports, thread pools, first touches of memory.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-warmups, repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            case = cases[name]
            case.before()
            gc.collect()  # or one case pays for what another left
            start = time.perf_counter()
            case.run()
            spent = time.perf_counter() - start
            case.after()
            if repeat >= 0:
                seconds[name].append(spent)
    return {name: Spread(tuple(values)) for name, values in seconds.items()}


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Describe the machine. The load at the start shows if it was quiet."""
    described: dict[str, Any] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": core_count(),
        "memory_nbytes": _kilobytes("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "load_before": list(os.getloadavg()),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        described |= {"gpu": properties.name, "gpu_memory_nbytes": properties.total_memory}
    return described


def versions() -> dict[str, Any]:
    """List the versions of the packages involved."""
    found = {"python": platform.python_version(), "dcp_nvcomp": _commit() or "unknown"}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def invocation(arguments: Sequence[str] | None = None) -> dict[str, str]:
    """The command and the date."""
    words = sys.argv[1:] if arguments is None else arguments
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"command": " ".join(["python", "-m", "benchmarks", *words]), "date": now.isoformat(timespec="seconds")}


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _kilobytes(path: str, name: str) -> int:
    value = _field(path, name)
    return int(value.split()[0]) * 1024 if value else 0


def available_nbytes() -> int:
    """Host memory that is free or can be freed."""
    return _kilobytes("/proc/meminfo", "MemAvailable")
