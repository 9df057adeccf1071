"""A training run as one object: it saves, keeps, copies and resumes. Needs torchdata for the data loader.

    torchrun --nproc-per-node 4 examples/run.py s3://bucket/run-7 --fast /dev/shm/$USER/run-7 --steps 60
    torchrun --nproc-per-node 2 examples/run.py s3://bucket/run-7 --fast /dev/shm/$USER/run-7 --steps 90

The second command goes on where the first one ended, or was killed: model, optimizer, scheduler, generators, and each
sample of the epoch once.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from dcp_nvcomp import Best, CheckpointManager, Keep, TrainingState
from dcp_nvcomp.runs import ElasticSampler

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 under newer torch
    from torchdata.stateful_dataloader import StatefulDataLoader

BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory or URL of the run")
    parser.add_argument("--fast", help="directory in each node's own memory or on its disk")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--endpoint-url", help="of an S3 server other than AWS")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    dataset = [(torch.randn(16, generator=torch.Generator().manual_seed(n)), n) for n in range(480)]
    loader: Any = StatefulDataLoader(dataset, BATCH, sampler=ElasticSampler(dataset))
    batches = iter(loader)

    def train_step() -> float:
        nonlocal batches
        inputs, numbers = next(batches, (None, None))
        if inputs is None:
            batches = iter(loader)
            inputs, numbers = next(batches)
        progress["samples"] += len(numbers) * dist.get_world_size()
        loss = functional.mse_loss(model(inputs).squeeze(1), torch.sin(numbers.float()))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    options = {"endpoint_url": arguments.endpoint_url} if arguments.endpoint_url else {}
    fast = {"fast": arguments.fast, "fast_every": 5, "copies": 1} if arguments.fast else {}
    progress = {"samples": 0}
    state = {"train": TrainingState(model, optimizer, scheduler=scheduler, dataloader=loader), "progress": progress}
    with CheckpointManager(
        arguments.run,  # durable: any path or URL
        every=20,  # steps between durable saves
        keep=Keep(last=3, every=10_000, best=Best("loss", "min", 2)),
        **fast,  # each node's own memory or disk, and one copy on a peer
        **options,
    ) as manager:
        restored = manager.restore(state)  # None at the first start
        if restored:
            progress, batches = state["progress"], iter(loader)
            if dist.get_rank() == 0:
                print(f"goes on after step {restored.step}, {progress['samples']} samples", flush=True)
        for step in range(restored.step + 1 if restored else 0, arguments.steps):
            loss = train_step()
            is_last = step == arguments.steps - 1
            if manager.should_save(step) or is_last:
                manager.save(step, state, metrics={"loss": loss}, durable=is_last)
            if manager.preempted:
                break
        manager.wait()
        if dist.get_rank() == 0:
            print(f"steps {[saved.step for saved in manager.steps()]}, {progress['samples']} samples", flush=True)
            print(f"look at it: dcp-nvcomp ls {arguments.run}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
