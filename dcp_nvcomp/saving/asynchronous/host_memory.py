"""How much host memory staging may take if the user does not say."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_MIN_NBYTES = 64 << 20  # so that all threads encode a small state at once
_CGROUP = Path("/sys/fs/cgroup")


def default_budget_nbytes(state_nbytes: int) -> int:
    """Return the smaller of twice the state's size and a quarter of what the host has free for each of its ranks.

    One save takes what it is encoded to. But the next one is staged while it is still written, and should not wait.
    """
    wanted = max(2 * state_nbytes, _MIN_NBYTES)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's
    free = free_nbytes()
    if free is None:
        return wanted
    return min(wanted, free // 4 // (int(ranks) if ranks.isdecimal() and int(ranks) else 1))


def free_nbytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return how much memory processes may still take: of the machine, or of the container; None if unknown."""
    found = []
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(int(value.split()[0]) << 10)
    limit, used = (" ".join(_lines(cgroup / name)) for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():  # else it is "max", or there is no such limit
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return ()
