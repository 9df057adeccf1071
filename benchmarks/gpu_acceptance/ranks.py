"""Step: two ranks of an FSDP2 job on one GPU save together and load together, over gloo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.results import Probe
from benchmarks.gpu_acceptance.saving import budget, left_to_the_cpu, on_the_engine, warnings_of
from benchmarks.processes import Ranks
from dcp_nvcomp import NvcompReader, NvcompWriter


def probes(host: Host) -> Iterator[Probe]:
    yield "two ranks save, two and one load", partial(_two, host)


def _two(host: Host) -> Mapping[str, Any]:
    with host.scratch() as path, Ranks(2) as ranks:
        saved = ranks.run(2, _save, host, path)
        loaded = ranks.run(2, _load, host, path)
        alone = ranks.run(1, _load, host, path)
    warned = sorted({message for of_rank in (*saved, *loaded, *alone) for message in of_rank})
    return {"warnings": warned}


def _state(seed: int, device: torch.device) -> dict[str, Any]:
    from tests.distributed.jobs import JOBS, state_of

    if device.type == "cuda":
        torch.cuda.set_device(device)
    return state_of(*JOBS["fsdp2"](seed, device))


def _whole(state: Any) -> Any:
    """Return the state in host memory with each DTensor put together; a collective.

    Shards go through host memory: gloo gathers no tensors of a GPU.
    """
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, state.to_local().detach().cpu())
        return torch.cat(shards) if state.placements[0].is_shard() else shards[0]
    return state.detach().cpu() if isinstance(state, torch.Tensor) else state


def _save(host: Host, path: Path) -> list[str]:
    """Save a state on each rank, and store the whole state next to it; returns the warnings."""
    state = _state(1, host.torch_device)
    with on_the_engine(host), warnings_of() as warned:
        dcp.save(state, storage_writer=NvcompWriter(path / "checkpoint", sync_files=False, **budget(host)))
    left_to_the_cpu(warned)
    whole = _whole(state)
    if dist.get_rank() == 0:
        torch.save(whole, path / "whole.pt")
    return warned


def _load(host: Host, path: Path) -> list[str]:
    """Load it into a model of other values, on each rank, and compare; returns the warnings."""
    state = _state(2, host.torch_device)
    with on_the_engine(host), warnings_of() as warned:
        dcp.load(state, storage_reader=NvcompReader(path / "checkpoint", **budget(host)))
    left_to_the_cpu(warned)
    _assert_same(_whole(state), torch.load(path / "whole.pt"), "state")
    return warned


def _assert_same(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            _assert_same(found[key], value, f"{name}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), name
    else:
        assert found == expected, name
