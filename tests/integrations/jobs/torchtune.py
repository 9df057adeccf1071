"""torchtune: its checkpointer for intermediate checkpoints, asynchronous as its recipes have it, with `install`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchtune.training.checkpointing import DistributedCheckpointer

from dcp_nvcomp.integrations import install
from tests.integrations.jobs.common import Job, batch, net


def main() -> None:
    job = Job()
    dist.init_process_group("gloo")
    install(writer={"codec": "auto"})
    model = net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saving = dist.new_group(backend="gloo")
    checkpointer = DistributedCheckpointer(str(job.directory), str(job.directory), process_group=saving)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def train(step: int) -> None:
        data = batch(step, job.rank)
        (model(data) - data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if job.resumes:
        train(0)  # so that there is state to load into
        loaded = checkpointer.load_checkpoint(state())
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        job.note("loaded", 2, state())
    for step in range(3 if job.resumes else 1, 5):
        train(step)
        if step <= 2:
            job.note("saved", step, state())
            checkpointer.save_checkpoint(state(), epoch=step, save_async=step == 2)
    job.note("trained", 4, state())
    if not job.resumes:
        checkpointer._checkpoint_future.result()
        job.die()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
