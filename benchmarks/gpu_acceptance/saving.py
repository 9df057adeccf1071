"""Saves and loads of a state on the GPU, and of host tensors as if they were there on the stand-in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import State
from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.engines.cuda.pool import shared_pool

__all__ = ["Memory", "budget", "differing", "left_to_the_cpu", "load", "on_the_engine", "save", "warnings_of"]


@contextmanager
def on_the_engine(host: Host, *, capacity_nbytes: int = 1 << 40) -> Iterator[Memory]:
    """Have all saves and loads inside use the CUDA engine, which on a CPU stands on the stand-in.

    Args:
        host: where.
        capacity_nbytes: the memory of each of the stand-in's devices.
    """
    if not host.stand_in:
        yield Memory(None)
        return
    import pytest

    from dcp_nvcomp.engines.tensors import plain_allocate
    from dcp_nvcomp.loading import decoder
    from dcp_nvcomp.saving.asynchronous import segments
    from dcp_nvcomp.saving.encode import tasks as buffers
    from tests.engines.kernels_on_cpu import ReferenceKernels
    from tests.engines.stand_in_pool import install_stand_ins

    with pytest.MonkeyPatch.context() as patch:
        for module in (buffers, decoder, segments):
            patch.setattr(module, "pinned_allocate", plain_allocate)
        pool = install_stand_ins(patch, ReferenceKernels(), self_test=True)
        pool.capacity_nbytes = capacity_nbytes
        yield Memory(pool)


class Memory:
    """Device memory that saves and loads hold.

    Args:
        pool: the stand-ins, or None for the GPU.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def taken(self) -> Mapping[str, float]:
        """Return how much torch has reserved and allocated, and how much of the GPU is used, in MiB."""
        if self._pool is not None:
            held = sum(device.held_nbytes for device in self._pool.devices) / 2**20
            return {"reserved_mib": held, "allocated_mib": held, "used_mib": held}
        free, total = torch.cuda.mem_get_info()
        return {
            "reserved_mib": torch.cuda.memory_reserved() / 2**20,
            "allocated_mib": torch.cuda.memory_allocated() / 2**20,
            "used_mib": (total - free) / 2**20,
        }


def budget(host: Host) -> dict[str, int]:
    """Return a small budget for the stand-in, which fills its memory with garbage first; none for a GPU."""
    return host.pick({}, {"device_memory_budget": 16 * MIB})


def save(host: Host, path: Path, state: State, **options: Any) -> Any:
    """Save in this process alone; returns the writer."""
    writer = NvcompWriter(path, sync_files=False, **budget(host), **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return writer


def load(host: Host, path: Path, into: State, **options: Any) -> None:
    """Load in this process alone."""
    dcp.load(into, storage_reader=NvcompReader(path, **budget(host), **options), no_dist=True)


def differing(found: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bit-identical."""
    return [
        name
        for name, tensor in state.items()
        if not torch.equal(found[name].view(torch.uint8).to(tensor.device), tensor.view(torch.uint8))
    ]


def left_to_the_cpu(warned: list[str]) -> None:
    """Raise if the engine has left some of its work to the CPU: what was measured is not of a GPU.

    It warns once in a process, so what it has said is asked too.
    """
    left = [message for message in warned if "CPU engine" in message]
    said = [kind for engines in shared_pool()._all() for kind in engines.health._warned]
    if left or said:
        raise AssertionError(f"left to the CPU: {left or said}")


@contextmanager
def warnings_of() -> Iterator[list[str]]:
    """Collect what is warned of inside: the engine warns when it leaves work to the CPU."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")
        yield messages
    messages += [f"{one.category.__name__}: {one.message}"[:500] for one in caught]
