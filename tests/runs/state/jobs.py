"""A small training over a data loader, as ranks of a gloo group run it: dropout, a scheduler, recorded samples."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from dcp_nvcomp import CheckpointManager, TrainingState
from dcp_nvcomp.runs import ElasticSampler

__all__ = ["Numbers", "consume", "train"]


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """A map-style dataset whose samples say which they are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((8,), float(index)) / self.count


def loader_of(
    count: int, batch_size: int, *, workers: int = 0, every: int = 1, elastic: bool = True
) -> StatefulDataLoader:
    """Return this rank's loader."""
    dataset = Numbers(count)
    sampler: Any
    if elastic:
        sampler = ElasticSampler(dataset, seed=3)
    else:
        is_distributed = dist.is_initialized()
        sampler = StatefulDistributedSampler(
            dataset,
            num_replicas=dist.get_world_size() if is_distributed else 1,
            rank=dist.get_rank() if is_distributed else 0,
            seed=3,
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13
        return StatefulDataLoader(
            dataset,
            batch_size,
            sampler=sampler,
            num_workers=workers,
            snapshot_every_n_steps=every,
            prefetch_factor=2 if workers else None,
            multiprocessing_context="fork" if workers else None,  # the pool's default imports torch for each
        )


def consume(
    place: Path, batches: int, *, count: int, batch_size: int, saves: bool, **loader_options: Any
) -> list[list[int]]:
    """Restore, take that many batches (all that is left if -1), save if asked, take two more that count for nothing."""
    loader = loader_of(count, batch_size, **loader_options)
    state = {"train": TrainingState(torch.nn.Linear(1, 1), dataloader=loader)}
    taken = []
    with CheckpointManager(place, every=1, run_id="job", preemption_signals=()) as manager:
        restored = manager.restore(state)
        step = 0 if restored is None else restored.step
        iterator = iter(loader)
        for indices, _ in iterator:
            taken.append(indices.tolist())
            if len(taken) == batches:
                break
        if saves:
            manager.save(step + 1, state)
            for _ in range(2):  # a crash loses these, and they come again
                next(iterator, None)
    return taken


def train(
    place: Path,
    steps: int,
    *,
    stop_at: int | None = None,
    epoch_count: int = 48,
    workers: int = 0,
    replicas: int = 1,
    **manager_options: Any,
) -> dict[str, Any]:
    """Train up to a step, from the newest checkpoint; die after `stop_at`, whose checkpoint is the last.

    With several replicas the model is sharded within each (HSDP).
    """
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    random.seed(11)
    np.random.seed(13)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
    torch.manual_seed(5)
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        if replicas > 1:
            dims = (replicas, dist.get_world_size() // replicas)
            fully_shard(model, mesh=init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")))
        else:
            fully_shard(model)
    torch.manual_seed(17 + (dist.get_rank() if dist.is_initialized() else 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    own = torch.Generator().manual_seed(19)
    loader = loader_of(epoch_count, 2, workers=workers)
    progress = {"epoch": 0}
    state = {
        "train": TrainingState(
            model,
            optimizer,
            scheduler=scheduler,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            dataloader=loader,
            generators={"own": own},
        ),
        "progress": progress,
    }
    losses: dict[int, float] = {}
    samples: list[int] = []
    options = {"every": 3, "run_id": "job", "preemption_signals": (), **manager_options}
    with CheckpointManager(place, **options) as manager:
        restored = manager.restore(state)
        step = restored.step if restored else 0
        while step < steps and step != stop_at:
            loader.sampler.set_epoch(state["progress"]["epoch"])
            for indices, inputs in loader:
                step += 1
                optimizer.zero_grad()
                noise = random.random() + np.random.rand() + torch.rand((), generator=own)
                loss = (model(inputs) * noise).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses[step] = loss.item()
                samples += indices.tolist()
                if manager.should_save(step):
                    manager.save(step, state)
                if step in (steps, stop_at):
                    break
            else:
                state["progress"]["epoch"] += 1
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in parameters.items()}
    return {"losses": losses, "samples": samples, "parameters": {name: one.tolist() for name, one in local.items()}}
