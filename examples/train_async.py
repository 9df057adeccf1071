"""Train with FSDP2 and save in the background: training goes on while a checkpoint is encoded and written.

    torchrun --nproc-per-node 2 examples/train_async.py --checkpoints runs/async --steps 60 --save-every 20

What matters is the group that `checkpoint_group` makes. `dcp.async_save` runs its collectives on a background thread;
on a group that training uses as well, they get mixed up with those of training, which deadlocks or aborts. NCCL alone,
which has no collectives for the CPU, is refused. So saves get a gloo group of their own.
"""

from __future__ import annotations

import argparse
from concurrent.futures import Future

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from train_fsdp import Training, add_model_arguments, end_distributed, load, start_distributed

from dcp_nvcomp import NvcompWriter, SaveStats


def checkpoint_group() -> dist.ProcessGroup:
    """Return a group of all ranks, for saves alone."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def begin_save(training: Training, path: str, group: dist.ProcessGroup) -> Future[Metadata]:
    """Copy the state to host memory, and save the copy in the background."""
    future: Future[Metadata] = dcp.async_save(
        training.state_dict(), storage_writer=NvcompWriter(path), process_group=group
    )
    return future


def end_save(future: Future[Metadata]) -> None:
    """Wait for a save, and raise its error if it failed on any rank."""
    stats = SaveStats.of(future.result())
    if dist.get_rank() == 0:
        print(stats, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--checkpoints", required=True, help="directory or URL; each save goes to step-N in it")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    arguments = parser.parse_args()

    training = Training(start_distributed(), width=arguments.width, depth=arguments.depth)
    group = checkpoint_group()
    saving: Future[Metadata] | None = None
    while training.progress.step < arguments.steps:
        loss = training.train_step(arguments.global_batch)
        step = training.progress.step
        if step % arguments.save_every == 0:
            if saving is not None:
                end_save(saving)  # one at a time: each holds a copy of the state
            saving = begin_save(training, f"{arguments.checkpoints}/step-{step}", group)
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss:.4f}  saving in the background", flush=True)
    if saving is not None:
        end_save(saving)
        last = training.progress.step // arguments.save_every * arguments.save_every
        load(training, f"{arguments.checkpoints}/step-{last}")
        if dist.get_rank() == 0:
            print(f"loaded step {training.progress.step}", flush=True)
    end_distributed()


if __name__ == "__main__":
    main()
