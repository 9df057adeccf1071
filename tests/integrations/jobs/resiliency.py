"""nvidia-resiliency-ext: asynchronous saves through its queue, in a process of its own (`persistent`) or by `fork`."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

from dcp_nvcomp import NvcompReader
from dcp_nvcomp.integrations.async_writer import NvcompAsyncWriter
from tests.integrations.jobs.common import Job, Sharded, nvrx_queue, stand_in_for_cuda


def main() -> None:
    job = Job()
    stand_in_for_cuda()
    dist.init_process_group("gloo")
    training = Sharded(job)
    state, train = training.state, training.train
    queue = nvrx_queue(persistent="persistent" in job.options)

    def save(step: int) -> None:
        writer = NvcompAsyncWriter(job.directory / f"step-{step}")
        planned = save_state_dict_async_plan(state(), writer, None, 0, planner=dcp.DefaultSavePlanner())
        write, copy, arguments = writer.get_save_function_and_args()
        finalize = [lambda: save_state_dict_async_finalize(*planned)]
        queue.schedule_async_request(AsyncRequest(write, arguments, finalize, preload_fn=copy))
        job.note("saved", step, state())

    if job.resumes:
        train(0)  # so that there is state to load into
        loaded = state()
        dcp.load(loaded, storage_reader=NvcompReader(job.directory / "step-2"))
        training.load(loaded)
        job.note("loaded", 2, state())
    for step in range(3 if job.resumes else 1, 5):
        train(step)
        if step <= 2:
            save(step)  # the second while the first is under way
    job.note("trained", 4, state())
    if not job.resumes:
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        job.die()
    dist.barrier()  # a process whose peer is gone may be aborted while its group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
