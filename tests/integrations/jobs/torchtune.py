"""torchtune: its checkpointer for intermediate checkpoints, asynchronous as its recipes have it, with `install`."""

from __future__ import annotations

import torch.distributed as dist
from torchtune.training.checkpointing import DistributedCheckpointer

from dcp_nvcomp.integrations import install
from tests.integrations.jobs.common import Job, Sharded


def main() -> None:
    job = Job()
    dist.init_process_group("gloo")
    install(writer={"codec": "auto"})
    training = Sharded(job)
    state, train = training.state, training.train
    saving = dist.new_group(backend="gloo")
    checkpointer = DistributedCheckpointer(str(job.directory), str(job.directory), process_group=saving)

    if job.resumes:
        train(0)  # so that there is state to load into
        loaded = checkpointer.load_checkpoint(state())
        training.load(loaded)
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
    dist.barrier()  # a process whose peer is gone may be aborted while its group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
