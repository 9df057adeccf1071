"""A job for torchrun: FSDP2 state saved by this package and by stock DCP, or loaded from both and compared.

    torchrun --nproc-per-node 2 -m tests.distributed.gpu.fsdp2_job save DIRECTORY
    torchrun --nproc-per-node 4 -m tests.distributed.gpu.fsdp2_job load DIRECTORY

Each rank takes a GPU of its own and nccl. Where there are fewer GPUs than ranks they share one, over gloo.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from tests.conformance.plugins import OURS, STOCK
from tests.distributed.jobs import JOBS, state_of
from tests.states import assert_same


def _join(device_type: str) -> torch.device:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    enough = torch.cuda.device_count() >= world_size
    dist.init_process_group("cpu:gloo,cuda:nccl" if enough else "gloo")
    return device


def _local(value: Any, *, zeroed: bool = False) -> Any:
    """The rank's own shards in place of the DTensors, copied; or the state itself, with its tensors set to zero."""
    if isinstance(value, dict):
        return {key: _local(item, zeroed=zeroed) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if zeroed:
        with torch.no_grad():
            value.zero_()
        return value
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["save", "load"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()

    device = _join(options.device)
    state = state_of(*JOBS["fsdp2"](1 if options.action == "save" else 2, device))
    if options.action == "save":
        dcp.save(state, storage_writer=STOCK.writer(options.directory / "stock"))
        writer = OURS.writer(options.directory / "ours", engine=options.engine, codec=options.codec)
        dcp.save(state, storage_writer=writer)
    else:
        _local(state, zeroed=True)
        dcp.load(state, storage_reader=STOCK.reader(options.directory / "stock"))
        expected = _local(state)
        assert any(bool(shard.any()) for shard in expected["model"].values())
        _local(state, zeroed=True)
        dcp.load(state, storage_reader=OURS.reader(options.directory / "ours", engine=options.engine))
        assert_same(_local(state), expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
