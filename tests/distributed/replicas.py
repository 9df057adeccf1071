"""Loads of replicas, and reads of theirs that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_nvcomp import NvcompReader, errors, load, save
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.states import State, assert_same, blank

from .jobs import assert_alive

# 1 MiB is the least that a read takes
SMALL_READS = {"host_memory_budget": 1 << 20, "thread_count": 2}
NBYTES = 24 << 20


def full_state() -> State:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"w{number}": torch.randn(1024, 1024, generator=generator) for number in range(4)}
    return {**tensors, "half": torch.randn(2048, 2048, generator=generator).bfloat16(), "step": 7}


def placed(full: State, kind: str) -> State:
    """Return a state as jobs have it: copies on all ranks, HSDP with two replicas, or partly sharded."""
    world = dist.get_world_size()
    if kind == "ddp":
        return full
    mesh = init_device_mesh("cpu", (2, world // 2)) if kind == "hsdp" else init_device_mesh("cpu", (1, world))
    kept = ("w0", "w1", "w2") if kind == "mixed" else ()
    return {
        key: distribute_tensor(value, mesh, [Replicate(), Replicate() if key in kept else Shard(0)], src_data_rank=None)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in full.items()
    }


def local(state: State) -> State:
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}


def reader_at(path: Path) -> NvcompReader:
    return NvcompReader(path, **SMALL_READS)  # type: ignore[arg-type]


def loaded(path: Path, kind: str, policy: str = "always", reader: NvcompReader | None = None, **options: Any) -> Any:
    """Load on this rank, compare, and return what was read and received."""
    reader = reader or reader_at(path)
    into = placed(blank(full_state()), kind)
    load(into, storage_reader=reader, exchange=policy, **options)  # type: ignore[arg-type]
    assert_same(local(into), local(placed(full_state(), kind)))
    assert reader.last_load is not None
    return reader.last_load.fetched_nbytes, reader.last_load.received_nbytes


def nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


class Reads:
    """Counts the reads of a rank, and fails some."""

    def __init__(self, fails: Callable[[int], bool], *, how: str = "raise") -> None:
        self.count, lock, read = 0, threading.Lock(), PosixFilesystem.read_into

        def read_into(filesystem: Any, name: str, start: int, buffer: memoryview) -> None:
            if not name.endswith(".distcp") or len(buffer) < 1 << 19:  # footers are no part of this
                read(filesystem, name, start, buffer)
                return
            with lock:
                self.count += 1
                number = self.count
            if fails(number):
                if how == "exit":
                    os._exit(9)
                if how == "raise":
                    raise errors.StorageError("The disk is gone.", path=name)
            read(filesystem, name, start, buffer)
            if fails(number):
                buffer[len(buffer) // 2] ^= 0xFF

        self.patched = patch.object(PosixFilesystem, "read_into", read_into)


def reader_of(path: Path, threads: int) -> NvcompReader:
    return NvcompReader(path, host_memory_budget=threads << 20, thread_count=threads)


def save_on_one(path: Path) -> None:
    if dist.get_rank() == 0:
        save(full_state(), path, no_dist=True)
    dist.barrier()


def still_works(path: Path) -> None:
    """Nothing of the load before is left in the group."""
    assert_alive()
    assert loaded(path, "ddp")[1] > 0
    names = ("dcp-arrive", "dcp-send", "dcp-share", "dcp-replace", "dcp-load")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]
