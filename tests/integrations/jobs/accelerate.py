"""Accelerate: `save_state` and `load_state` of an FSDP2 model, with `install`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration

from dcp_nvcomp.integrations import install
from tests.integrations.jobs.common import Job, batch, net


def main() -> None:
    job = Job()
    PartialState(cpu=True)  # Accelerate has no FSDP for CPUs: it takes these for GPUs
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    install(writer={"codec": "auto"})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="size_based_wrap", min_num_params=1000
    )
    project = ProjectConfiguration(str(job.directory), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(fsdp_plugin=plugin, project_config=project)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    if job.resumes:
        accelerator.load_state()
        job.note("loaded", 3, state())
    for step in range(4 if job.resumes else 1, 6):
        data = batch(step, job.rank)
        accelerator.backward((model(data) - data).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step <= 3 and not job.resumes:
            accelerator.save_state()  # the first of three is removed
            job.note("saved", step, state())
    job.note("trained", 5, state())
    if not job.resumes:
        job.die()
    accelerator.end_training()


if __name__ == "__main__":
    main()
