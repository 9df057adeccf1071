"""Save on 4 ranks, load on 2 with other placements: nothing about the ranks is in the checkpoint's way.

python examples/reshard.py [DIRECTORY_OR_URL]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, zeros

from dcp_nvcomp import NvcompReader, NvcompWriter

# name: mesh and placements when saved on 4 ranks, and when loaded on 2
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement], tuple[int, ...], list[Placement]]] = {
    "rows": ((4,), [Shard(0)], (2,), [Shard(1)]),
    "tiles": ((2, 2), [Shard(0), Shard(1)], (2,), [Shard(0)]),
    "whole": ((4,), [Shard(1)], (2,), [Replicate()]),
}


def full_tensor(name: str) -> torch.Tensor:
    """Return the expected values, which every rank can compute."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(1000, 300, generator=generator)


def save_rank(rank: int, path: str, meeting_point: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=4)
    state = {
        name: distribute_tensor(full_tensor(name), init_device_mesh("cpu", mesh), placements)
        for name, (mesh, placements, _, _) in LAYOUTS.items()
    }
    dcp.save(state, storage_writer=NvcompWriter(path))
    dist.barrier()
    dist.destroy_process_group()


def load_rank(rank: int, path: str, meeting_point: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    state: dict[str, DTensor] = {
        name: zeros(1000, 300, device_mesh=init_device_mesh("cpu", mesh), placements=placements)
        for name, (_, _, mesh, placements) in LAYOUTS.items()
    }
    dcp.load(state, storage_reader=NvcompReader(path))
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), full_tensor(name))
        print(f"rank {rank}: {name} loaded as {tuple(tensor.to_local().shape)}, {tensor.placements}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function: Callable[..., None], count: int, *arguments: str) -> None:
    """Stands in for torchrun here; forked, so that torch is imported once."""
    mp.start_processes(function, arguments, nprocs=count, start_method="fork")


def main() -> None:
    """Save on four ranks, and load on two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", default="examples-out/reshard", metavar="DIRECTORY_OR_URL")
    path = parser.parse_args().path
    with tempfile.TemporaryDirectory() as meeting_points:
        run_ranks(save_rank, 4, path, str(Path(meeting_points, "save")))
        run_ranks(load_rank, 2, path, str(Path(meeting_points, "load")))
    print(f"look at it: dcp-nvcomp inspect {path}")


if __name__ == "__main__":
    main()
