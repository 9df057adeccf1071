"""The states that the killed saves save, and what a load finds of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from tests.conformance.values import trained
from tests.states import opposite_of, same

TENSOR_COUNT = 4


def values(seed: str) -> dict[str, Any]:
    """Return what is saved: on each rank a part of every tensor, and from one of them an object."""
    tensors = {f"w{number}": trained(torch.float32, (40 + number, 50), seed) for number in range(TENSOR_COUNT)}
    return {**tensors, "seed": seed}


def sharded(seed: str) -> dict[str, Any]:
    """The same with every tensor sharded over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = values(seed)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
    return state


def new_writer(kind: str, path: Path) -> Any:
    """A writer that gives each item a file of its own."""
    if kind == "ours":
        return NvcompWriter(path, single_file_per_rank=False, thread_count=2)
    return dcp.FileSystemWriter(path, single_file_per_rank=False)


def new_reader(kind: str, path: Path) -> Any:
    """A reader of what `new_writer` wrote."""
    return NvcompReader(path, thread_count=1) if kind == "ours" else dcp.FileSystemReader(path)


def loaded(writer: str, path: Path) -> str:
    """Load, and return "old", "new", "next", "mixed" or "wrong", "nothing" if the reader says so, or "lost"."""
    state: dict[str, Any] = {
        name: opposite_of(value) if isinstance(value, torch.Tensor) else "" for name, value in values("old").items()
    }
    missing: type[Exception] = errors.CheckpointNotFoundError if writer == "ours" else FileNotFoundError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            new_reader(writer, path).read_metadata()
        except missing:
            return "nothing"
        except Exception:
            return "lost"
        try:
            dcp.load(state, storage_reader=new_reader(writer, path), no_dist=True)
        except dcp.CheckpointException:
            return "lost"
    known = {seed: values(seed) for seed in ("old", "new", "next")}
    for seed, expected in known.items():
        if all(same(state[name], expected[name]) for name in expected):
            return seed
    parts = [_is_of_saves(state[name], [expected[name] for expected in known.values()]) for name in state]
    return "mixed" if all(parts) else "wrong"


def _is_of_saves(value: Any, saved: list[Any]) -> bool:
    """True if each row is of one of the saves."""
    if not isinstance(value, torch.Tensor):
        return value in saved
    return all(any(same(value[row], of[row]) for of in saved) for row in range(len(value)))


def save_next(writer: str, path: Path) -> None:
    """The next save at a path: as after a restart, by a process that knows nothing of the one that was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values("next"), storage_writer=new_writer(writer, path), no_dist=True)
