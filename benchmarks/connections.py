"""`connections`: the sockets of each rank of a gloo job, after what this package does with all ranks.

Gloo connects each rank with each other when a group is made; with `TORCH_GLOO_LAZY_INIT=1` in the environment, two
ranks when they first have something to say to each other. Counted are the sockets that a process has open.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.processes import Ranks
from benchmarks.results import Report
from dcp_nvcomp import CheckpointManager, async_save, load, save

_VARIABLE = "TORCH_GLOO_LAZY_INIT"
_STAGES = ("group", "save", "load", "async_save", "manager")


def connections(report: Report) -> None:
    settings = report.settings
    counts = (2, 4) if settings.quick else (4, 8, 16)
    table = report.table(
        "connections",
        "Sockets that a rank of a job over gloo has open after each step: rank 0, the coordinator / most of another",
        ranks=("ranks", ","),
        lazy=("TORCH_GLOO_LAZY_INIT", ""),
        group=("init_process_group", ""),
        save=("save", ""),
        load=("load", ""),
        async_save=("async_save, twice", ""),
        manager=("a manager's saves", ""),
    )
    for count in counts:
        for lazy in ("0", "1"):
            settings.say(f"connections of {count} ranks, {_VARIABLE}={lazy}")
            with mock.patch.dict(os.environ, {_VARIABLE: lazy}), settings.scratch() as scratch, Ranks(count) as ranks:
                each = ranks.run(count, _sockets_after, str(scratch))
            others = [max(rank[stage] for rank in each[1:]) for stage in range(len(_STAGES))]
            counted = [f"{mine} / {most}" for mine, most in zip(each[0], others, strict=True)]
            table.add(ranks=count, lazy=lazy, **dict(zip(_STAGES, counted, strict=True)))


def _sockets_after(place: str) -> list[int]:
    dist.barrier()
    counted = [_sockets()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = dist.get_world_size()
    state = {f"{number}": distribute_tensor(torch.ones(rows, 8), mesh, [Shard(0)]) for number in range(8)}

    def count() -> None:
        dist.barrier()
        counted.append(_sockets())
        dist.barrier()

    save(state, f"{place}/saved")
    count()
    load(state, f"{place}/saved")
    count()
    for number in range(2):
        async_save(state, f"{place}/later-{number}").upload_completion.result()
    count()
    with CheckpointManager(f"{place}/run", every=1) as manager:
        for step in range(3):
            manager.save(step, state)
        manager.wait()
        count()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place)
    return counted


def _sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.readlink(link).startswith("socket:")
    return found
