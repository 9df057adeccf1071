"""Train with FSDP2 and save through torch_checkpointing's manager into compressed files.

    torchrun --nproc-per-node 2 examples/train_torch_checkpointing.py --checkpoints runs/manager --steps 60

Started again, it goes on from its newest checkpoint: the one with the highest number that was committed. The manager
stages on a thread and writes in a process of its own; training goes on at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from train_fsdp import Training, add_model_arguments, end_distributed, start_distributed

from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig


def make_manager(path: str) -> CheckpointManager:
    """All ranks make their managers together, once the process group is there."""
    on_gpu = torch.cuda.is_available()
    staging = CheckpointStagerConfig(use_pinned_memory=on_gpu, use_non_blocking_copy=on_gpu)
    save = AsyncCheckpointSaverConfig(staging_config=staging)
    return CheckpointManager(CheckpointManager.Config(storage_config=NvcompStorageConfig(path), save=save))


def state_of(training: Training) -> dict[str, Any]:
    """Model, optimizer and progress, as DCP's functions give them."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer, "progress": training.progress.state_dict()}


def restore(training: Training, state: Mapping[str, Any]) -> None:
    """Put a state back."""
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    training.progress.load_state_dict(state["progress"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--checkpoints", required=True, help="directory; each save goes to step-N in it")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    arguments = parser.parse_args()

    training = Training(start_distributed(), width=arguments.width, depth=arguments.depth)
    manager = make_manager(arguments.checkpoints)
    saved = [int(path.parent.name.split("-")[1]) for path in Path(arguments.checkpoints).glob("step-*/.commit.json")]
    if saved:
        restore(training, manager.load(f"step-{max(saved)}", into=state_of(training)))
        if dist.get_rank() == 0:
            print(f"goes on after step {training.progress.step}", flush=True)
    saving = None
    while training.progress.step < arguments.steps:
        with manager.lock():  # the state does not change while it is staged
            loss = training.train_step(arguments.global_batch)
        step = training.progress.step
        if step % arguments.save_every == 0:
            if saving is not None:
                saving.result()  # it was written while these steps were made
            saving = manager.save(f"step-{step}", state_of(training))
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss:.4f}  saving in the background", flush=True)
    if saving is not None:
        saving.result()
    manager.close()
    end_distributed()


if __name__ == "__main__":
    main()
