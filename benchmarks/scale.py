"""`scale`: how time, memory and metadata grow. Its parts, for `--part`.

tensors    100 to 100,000 tensors of 1 KB                                                       growth.py
size       the same state, up to what fits in memory                                            growth.py
ranks      1 to 8 processes                                                                     growth.py
planning   the coordinator's planning and commit alone, for up to 4,096 simulated ranks; the
           safe read of `.metadata` beside pickle                                               planning.py
memory     peak memory of save and load under several budgets, watched from outside             memory.py
"""

from __future__ import annotations

from benchmarks import growth, memory, planning
from benchmarks.measuring import Settings
from benchmarks.results import Report

PARTS = {
    "tensors": growth.tensors,
    "size": growth.size,
    "ranks": growth.ranks,
    "planning": planning.planning,
    "memory": memory.memory,
}


def run(settings: Settings) -> Report:
    report = Report("scale", settings)
    for name, part in PARTS.items():
        if settings.wants(name):
            part(report)
    return report
