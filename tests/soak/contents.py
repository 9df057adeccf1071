"""The contents that a soak saves. Those of one path share keys and shapes, so a mixture of two would load."""

from __future__ import annotations

import random
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

CHANGE_EVERY = 1000  # seeds on end that have the same values of a tensor that seldom changes
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn)


def _value(seed: int, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 0.05).to(dtype)
    return torch.randint(0, 255, shape, generator=generator).to(dtype)


def content(family: int, seed: int) -> dict[str, torch.Tensor]:
    """Whole tensors: keys, shapes and dtypes from the family, values from the seed; two of them seldom change."""
    draw = random.Random(family)
    state = {}
    for number in range(draw.randint(3, 7)):
        shape = tuple(draw.choice([1, 3, 64, 301]) for _ in range(draw.randint(1, 3)))
        key = f"layers.{number}.weight"
        state[key] = _value(seed, key, shape, draw.choice(DTYPES))
    state["large"] = _value(seed, "large", (draw.randint(900, 1500), 512), draw.choice(DTYPES[:2]))
    state["frozen"] = _value(family, "frozen", (512, 512), draw.choice(DTYPES[:2]))
    state["rare"] = _value(seed // CHANGE_EVERY, "rare", (512, 512), draw.choice(DTYPES[:2]))
    return state


def facts(family: int, seed: int) -> dict[str, Any]:
    """A Python object that goes along."""
    return {"family": family, "seed": seed, "text": f"content {seed}"}


def _placements(draw: random.Random, tensor: torch.Tensor) -> list[Placement]:
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return [Shard(draw.choice(dims)) if dims and draw.random() < 0.8 else Replicate()]


def placed(state: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
    """The state as the ranks of the default process group hold it; plain tensors where there is no group."""
    if not dist.is_initialized():
        return {key: tensor.clone() for key, tensor in state.items()}
    draw, mesh = random.Random(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: distribute_tensor(tensor, mesh, _placements(draw, tensor), src_data_rank=None)
        for key, tensor in state.items()
    }


def local(tensor: Any) -> torch.Tensor:
    """This rank's part, as bytes."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach().contiguous().reshape(-1).view(torch.uint8)
