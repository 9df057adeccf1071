"""torch_checkpointing's manager through our storage: FSDP2, saved, killed and resumed; and resharded loads.

train: the process that writes is killed in the last save, then all ranks are. save, reshard: a matrix by rows, loaded
by rows and by columns on other ranks. Options: the path and the options of a storage, as JSON; else a directory.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.staging import CheckpointStagerConfig

from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig
from tests.integrations.jobs.common import Job, Sharded

SAVED, LAST = 3, 5
ROWS, COLUMNS = 600, 500


def _gather(self: DefaultMetadataManager, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Do what the library does, which puts the bytes on a GPU for it."""
    everyones: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyones, data, group=process_group)
    return dict(enumerate(everyones))


def _manager(job: Job, **items: ItemSpec) -> CheckpointManager:
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    path, options = map(json.loads, job.options) if job.options else (job.directory / "run", {})
    return CheckpointManager(
        CheckpointManager.Config(
            storage_config=NvcompStorageConfig(path, storage_options=options),
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            items=items,
        )
    )


def _train(job: Job) -> None:
    manager, sharded = _manager(job), Sharded(job)
    first = 1
    if job.resumes:
        state = sharded.state()
        sharded.load(dict(manager.load(f"step-{SAVED}", into=state)))
        job.note("loaded", SAVED, sharded.state())
        first = SAVED + 1
    for step in range(first, LAST + 1):
        sharded.train(step)
        if step == SAVED and not job.resumes:
            future = manager.save(f"step-{step}", sharded.state())
            assert future is not None
            future.result()
            job.note("saved", step, sharded.state())
    job.note("trained", LAST, sharded.state())
    if not job.resumes:
        manager.save(f"step-{LAST}", sharded.state())
        if job.rank == dist.get_world_size() - 1:
            _kill_writer()
        time.sleep(1)
        job.die()
    manager.close()


def _kill_writer() -> None:
    """End the process that writes for this rank, wherever it is in its save."""
    for process in torch.multiprocessing.active_children():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)


def _whole() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def _reshard(job: Job) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    manager = _manager(job, model=ItemSpec(resharder=DefaultResharder()))
    if job.how == "save":
        state = {
            "w": distribute_tensor(_whole(), mesh, [Shard(0)]),
            "r": distribute_tensor(_whole(), mesh, [Replicate()]),
        }
        future = manager.save("step-1", {"model": state})
        assert future is not None
        future.result()
    else:
        for dim in (0, 1):
            blank = torch.zeros(ROWS, COLUMNS)
            into = {
                "w": distribute_tensor(blank, mesh, [Shard(dim)]),
                "r": distribute_tensor(blank, mesh, [Shard(dim)]),
            }
            manager.load("step-1", into={"model": into})
            for value in into.values():
                assert torch.equal(value.full_tensor(), _whole()), dim
            print("resharded exactly", flush=True)
    manager.close()


def main() -> None:
    job = Job()
    dist.init_process_group("gloo")
    DefaultMetadataManager._all_gather_pickled_data = _gather
    if job.how in ("save", "reshard"):
        _reshard(job)
    else:
        _train(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
