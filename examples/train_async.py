"""Train with FSDP2 and save in the background: training waits for copies or encoding, not for writing.

    torchrun --nproc-per-node 2 examples/train_async.py --checkpoints runs/async --steps 60 --save-every 20

`async_save` returns when the state may change again. It needs no process group: it makes gloo groups of its own, so
training may use NCCL, and its collectives never meet those of a save.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from train_fsdp import Training, add_model_arguments, end_distributed, load, start_distributed

from dcp_nvcomp import AsyncSave, SaveStats, async_save


def end_save(saving: AsyncSave) -> None:
    """Wait for a save, and raise its error if it failed on any rank."""
    stats = SaveStats.of(saving.upload_completion.result())
    if dist.get_rank() == 0 and stats is not None:
        print(f"{stats}; training waited {stats.stall_seconds:.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--checkpoints", required=True, help="directory or URL; each save goes to step-N in it")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    arguments = parser.parse_args()

    training = Training(start_distributed(), width=arguments.width, depth=arguments.depth)
    saving: AsyncSave | None = None
    while training.progress.step < arguments.steps:
        loss = training.train_step(arguments.global_batch)
        step = training.progress.step
        if step % arguments.save_every == 0:
            if saving is not None:
                end_save(saving)  # it was written while these steps were made
            saving = async_save(training.state_dict(), f"{arguments.checkpoints}/step-{step}")
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss:.4f}  saving in the background", flush=True)
    if saving is not None:
        end_save(saving)
        last = training.progress.step // arguments.save_every * arguments.save_every
        load(training, f"{arguments.checkpoints}/step-{last}")
        if dist.get_rank() == 0:
            print(f"loaded step {training.progress.step}", flush=True)
            print(f"look at it: dcp-nvcomp ls {arguments.checkpoints}", flush=True)
    end_distributed()


if __name__ == "__main__":
    main()
