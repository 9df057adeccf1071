"""Training jobs small enough for tests: one model in every kind of parallelism, a step of AdamW, and its state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def sharded(full: dict[str, torch.Tensor], placement: Placement | None = None) -> dict[str, Any]:
    """Return tensors that are cut into rows for all ranks, or placed as `placement` says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(value, mesh, [placement or Shard(0)], src_data_rank=None)
        for name, value in full.items()
    }


def assert_alive() -> None:
    """Fail unless the process group can still be used."""
    total = torch.tensor([1])
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()


Job = Callable[[int, torch.device], tuple[nn.Module, torch.optim.Optimizer]]


class Block(nn.Module):
    """Two linear layers whose sizes divide by few world sizes, so that shards are uneven."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.up = nn.Linear(30, 28, dtype=dtype, device=device)
        self.down = nn.Linear(28, 30, dtype=dtype, device=device)
        self.register_buffer("calls", torch.tensor(0, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """A float32 table of some megabytes with its moments, and two bfloat16 blocks."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(9001, 30, device=device)
        self.blocks = nn.ModuleList(Block(torch.bfloat16, device) for _ in range(2))
        self.head = nn.Linear(30, 3, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x).bfloat16()
        for block in self.blocks:
            x = block(x)
        return self.head(x.float())


def _step(model: nn.Module, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if device.type == "cpu" or dist.get_backend() != "gloo":
        model(torch.arange(8, device=device) * 1001).square().sum().backward()
    else:  # gloo lacks the collectives for a backward pass on a GPU
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _world_mesh(device: torch.device, *shape: int) -> Any:
    return init_device_mesh(device.type, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def fsdp2(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, mesh = Model(seed, device), _world_mesh(device, dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _step(fully_shard(model, mesh=mesh), device)


def hsdp(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two replicas, each sharded."""
    model, mesh = Model(seed, device), _world_mesh(device, 2, dist.get_world_size() // 2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _step(fully_shard(model, mesh=mesh), device)


def _tensor_parallel(model: Model, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tp(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Tensor parallel only: the rest of the model is plain tensors, the same on every rank."""
    model = Model(seed, device)
    _tensor_parallel(model, _world_mesh(device, dist.get_world_size()))
    return _step(model, device)


def fsdp2_tp(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, mesh = Model(seed, device), _world_mesh(device, dist.get_world_size() // 2, 2)
    _tensor_parallel(model, mesh["inner"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["outer"])
    return _step(fully_shard(model, mesh=mesh["outer"]), device)


def plain(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """No parallelism: the whole model on every rank, as under DDP; or without a process group."""
    return _step(Model(seed, device), device)


JOBS: dict[str, Job] = {"fsdp2": fsdp2, "hsdp": hsdp, "tp": tp, "fsdp2+tp": fsdp2_tp, "plain": plain}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict that a user saves."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "seen": 8}


def whole(value: Any) -> Any:
    """The state with every sharded tensor put together, on the CPU; a collective, with the same result on each rank."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, ShardedTensor):
        return _whole_sharded_tensor(value)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: whole(value[key]) for key in value}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item) for item in value)
    return value


def _whole_sharded_tensor(value: ShardedTensor) -> torch.Tensor:
    mine = [(shard.metadata.shard_offsets, shard.tensor.detach().cpu()) for shard in value.local_shards()]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    metadata = value.metadata()
    result = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype)
    for offsets, shard in (pair for of_rank in of_all for pair in of_rank):
        region = tuple(slice(start, start + length) for start, length in zip(offsets, shard.shape, strict=True))
        result[region] = shard
    return result
