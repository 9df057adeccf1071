"""Megatron-core's sharded tensors and objects, killed in a save, on any number of ranks.

Options: `strategies`, or `mcore` or `nvrx`: asynchronous. The first step is saved, the second save is killed.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from dcp_nvcomp.integrations.megatron import NvcompLoadStrategy, NvcompSaveStrategy
from tests.faults.failpoints import BY_NAME
from tests.integrations.jobs.common import Job, stand_in_for_cuda
from tests.integrations.jobs.megatron import asynchronously, new_queue

SHAPES = {"rows": (1200, 64), "columns": (64, 2400), "replicated": (300,)}
MASTER = "optimizer.state.fp32_param.columns"  # as Megatron names the float32 one of "columns"


def whole(name: str, step: int) -> torch.Tensor:
    """Return a tensor as it is after a step; the same on any number of ranks."""
    seed = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(SHAPES[name], generator=seed)


def parts(step: int) -> dict[str, torch.Tensor]:
    """Return what this rank has of the tensors after a step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        "rows": whole("rows", step).chunk(ranks)[rank],
        "columns": whole("columns", step).chunk(ranks, dim=1)[rank].bfloat16().contiguous(),
        MASTER: whole("columns", step).chunk(ranks, dim=1)[rank].contiguous(),
        "replicated": whole("replicated", step),
    }


def sharded(tensors: dict[str, torch.Tensor], step: int | None) -> dict[str, Any]:
    """Return Megatron's description of a state; without a step, of one to load into."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        "model": {
            "rows": ShardedTensor.from_rank_offsets("rows", tensors["rows"], (0, rank, ranks)),
            "columns": ShardedTensor.from_rank_offsets("columns", tensors["columns"], (1, rank, ranks)),
            "replicated": ShardedTensor.from_rank_offsets("replicated", tensors["replicated"], replica_id=rank),
        },
        "optimizer": [ShardedTensor.from_rank_offsets(MASTER, tensors[MASTER], (1, rank, ranks))],
        "seen": ShardedObject("seen", {"seen": step}, (1,), (0,), replica_id=rank),
        **({} if step is None else {"step": step}),
    }


def main() -> None:
    job = Job()
    (how,) = job.options
    stand_in_for_cuda()
    dist.init_process_group("gloo")
    queue = None if how == "strategies" else new_queue(how)

    def save(step: int) -> None:
        path = job.directory / f"iter_{step:07}"
        if job.rank == 0:
            path.mkdir(exist_ok=True)
        dist.barrier()
        state, strategy = sharded(parts(step), step), NvcompSaveStrategy(writer={"codec": "auto"})
        if queue is None:
            dist_checkpointing.save(state, str(path), strategy)
        else:
            queue.schedule_async_request(dist_checkpointing.save(state, str(path), strategy, **asynchronously(how)))

    def finish() -> None:
        if queue is not None:
            queue.maybe_finalize_async_calls(blocking=True)

    def check(step: int) -> None:
        zeros = {name: torch.zeros_like(part) for name, part in parts(step).items()}
        strategy, path = NvcompLoadStrategy(), str(job.directory / f"iter_{step:07}")
        loaded = dist_checkpointing.load(sharded(zeros, None), path, strategy)
        job.note("loaded", step, [loaded["model"], loaded["optimizer"], loaded["seen"], loaded["step"]])
        model = parts(step)
        optimizer = [model.pop(MASTER)]
        job.note("right", step, [model, optimizer, {"seen": step}, step])

    if job.resumes:
        assert not dist_checkpointing.check_is_distributed_checkpoint(str(job.directory / "iter_0000002"))
        check(1)
    else:
        save(1)
        finish()
        if queue is None:
            in_a_save = BY_NAME["half of a block written"].ours
            assert in_a_save is not None
            if job.rank == 1:
                in_a_save.arm(lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(2)
            raise AssertionError("It should have been killed.")
    save(2)
    if not job.resumes:
        job.die()  # it may still write in the background: nothing was finalized
    finish()
    check(2)
    if queue is not None:
        queue.close()
    dist.barrier()  # a process whose peer is gone may be aborted while its group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
