"""How much host memory staging may take if the user does not say."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["default_budget_nbytes", "free_nbytes"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def default_budget_nbytes(state_nbytes: int) -> int:
    """Return the smaller of the state's size and a quarter of what the host has free for each of its ranks.

    Args:
        state_nbytes: size of what this rank saves.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's
    free = free_nbytes()
    if free is None:
        return state_nbytes
    return min(state_nbytes, free // 4 // (int(ranks) if ranks.isdecimal() and int(ranks) else 1))


def free_nbytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return how much memory processes may still take: of the machine, or of the container; None if unknown.

    Args:
        proc: where procfs is.
        cgroup: where the cgroup of the container is (version 2), as far as it is seen from inside.
    """
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
