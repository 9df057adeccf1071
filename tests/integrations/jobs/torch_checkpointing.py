"""torch_checkpointing's manager through our storage: FSDP2, saved, killed and resumed; and resharded loads.

train: the process that writes is killed in the last save, then all ranks are. save, reshard: a matrix by rows, loaded
by rows and by columns on other ranks. refused: another job commits first. Options: the path and the options of a
storage, as JSON; else a directory.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
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

from dcp_nvcomp.errors import CheckpointExistsError
from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorage, NvcompStorageConfig
from tests.integrations.jobs.common import Job, Sharded
from tests.integrations.torch_checkpointing_storage import put

SAVED, LAST = 3, 5
ROWS, COLUMNS = 600, 500


def _gather(self: DefaultMetadataManager, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Do what the library does, which puts the bytes on a GPU for it."""
    everyones: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyones, data, group=process_group)
    return dict(enumerate(everyones))


class _LateStorage(NvcompStorage):
    """A storage that finds, when it commits, that another job has."""

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        other = self._config.other.create_storage()
        for rank in range(2):
            put(other, f"{src_path}/model_{rank}.pt", {"w": torch.full((300, 200), 7.0)})
        other.rename(src_path, dst_path, is_directory=True)
        super().rename(src_path, dst_path, is_directory=True)


class _LateConfig(NvcompStorageConfig):
    """The config of `_LateStorage`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.other = NvcompStorageConfig(*arguments, **options)

    def create_storage(self) -> NvcompStorage:
        return _LateStorage(self)


def _manager(job: Job, config: type[NvcompStorageConfig] = NvcompStorageConfig, **items: ItemSpec) -> CheckpointManager:
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    path, options = map(json.loads, job.options) if job.options else (job.directory / "run", {})
    return CheckpointManager(
        CheckpointManager.Config(
            storage_config=config(path, storage_options=options),
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


def _refused(job: Job) -> None:
    future = _manager(job, _LateConfig).save("step-1", {"model": {"w": torch.zeros(300, 200)}})
    assert future is not None
    try:
        future.result()
    except CheckpointExistsError:
        print(f"rank {job.rank} is refused", flush=True)
    else:
        print(f"rank {job.rank} believes that it is saved", flush=True)
    dist.barrier()
    manager = _manager(job)
    into = {"model": {"w": torch.zeros(300, 200)}}
    loaded = manager.load("step-1", into=into)["model"]["w"]
    assert torch.equal(loaded, torch.full((300, 200), 7.0))
    print("what was committed is there", flush=True)
    manager.close()


def main() -> None:
    job = Job()
    dist.init_process_group("gloo")
    DefaultMetadataManager._all_gather_pickled_data = _gather
    if job.how in ("save", "reshard"):
        _reshard(job)
    elif job.how == "refused":
        _refused(job)
    else:
        _train(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
