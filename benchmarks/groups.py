"""`groups`: the connections of a rank for what a manager does collectively, by the number of ranks.

Ranks on this machine make a `CheckpointManager` and save a step. Counted are the connections that each of them has more
than before; those of the process group that they give it are not among them. gloo connects all ranks of a group with
each other, or, of a lazy group, those that send each other something, which the package has it do above 64 ranks.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.measuring import Settings
from benchmarks.processes import Ranks
from benchmarks.results import Report
from dcp_nvcomp import CheckpointManager
from dcp_nvcomp.calls import process_groups

_COUNTS = (8, 16, 32, 64, 96)
_MOST = 64  # for which each is connected with each other
_LARGE = 10_000


def run(settings: Settings) -> Report:
    report = Report("groups", settings)
    counts = _COUNTS[:2] if settings.quick else _COUNTS
    table = report.table(
        "connections",
        "Connections of a rank for a manager that has saved a step",
        ranks=("ranks", ",d"),
        way=("groups", ""),
        of_first=("connections of the coordinator", ",d"),
        of_others=("of each other rank, at most", ",d"),
        groups=("groups", ",d"),
    )
    lines: dict[str, list[tuple[float, float]]] = {"lazy": [], "each with each": []}
    with settings.scratch() as scratch:
        for count in counts:
            for way in lines:
                if way != "lazy" and count > _MOST:
                    continue
                settings.say(f"{count} ranks, {way}")
                with Ranks(count, are_forked=True) as ranks:  # new ones, which have no connections yet
                    each = ranks.run(count, _saves, str(scratch / f"{count} {way}"), way == "lazy")
                others = max(connections for connections, _ in each[1:])
                table.add(ranks=count, way=way, of_first=each[0][0], of_others=others, groups=each[0][1])
                lines[way].append((count, others))
    (few, at_few), (many, at_many) = lines["lazy"][0], lines["lazy"][-1]
    a_doubling = (at_many - at_few) / math.log2(many / few)
    expected = at_many + a_doubling * math.log2(_LARGE / many)
    report.at_most(f"connections of a rank that is not the coordinator, continued to {_LARGE:,} ranks", expected, 64)
    return report


def _saves(path: str, are_lazy: bool) -> tuple[int, int]:
    """Return how many connections and groups this rank has more than before."""
    torch.manual_seed(0)
    before, groups_before = _socket_count(), len(dist.distributed_c10d._world.pg_names)
    with patch.object(process_groups, "_MOST_CONNECTED", 0 if are_lazy else 1 << 30):
        manager = CheckpointManager(Path(path), every=1, preemption_signals=())
        manager.save(1, {"w": torch.ones(1000)}).saved.result()
        manager.wait()
        found = _socket_count() - before, len(dist.distributed_c10d._world.pg_names) - groups_before
        manager.close()
    dist.barrier()
    return found


def _socket_count() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return count
