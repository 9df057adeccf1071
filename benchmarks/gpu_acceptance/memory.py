"""Step: out of device memory, before a save, and with too little for what the budget allows. A process each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import State, made_state
from benchmarks.gpu_acceptance.results import Probe
from benchmarks.gpu_acceptance.saving import Memory, differing, load, on_the_engine, save, warnings_of
from dcp_nvcomp.engines.cuda.pool import release_device_memory

# What is left for the engines, in MiB: nothing, too little for one block, a little of what the budget allows.
_LEFT_MIB = (0, 1, 24, 160)


def probes(host: Host) -> Iterator[Probe]:
    for left in host.pick(_LEFT_MIB, (0, 1, 24)):
        yield f"{left} MiB left", partial(_little, host, left * MIB)
    yield "a caller's out of memory, then release_device_memory", partial(_released, host)


def _saved_and_loaded(host: Host, state: State, limit: Callable[[], object]) -> Mapping[str, Any]:
    """Save and load with little memory: both must work, and what they do must be right."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    on_cpu = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    with host.files_in_memory(1 << 30) as folder:
        limit()
        with warnings_of() as warned:
            writer = save(host, folder / "checkpoint", state, engine="auto")
            load(host, folder / "checkpoint", into, engine="auto")
        if not host.stand_in:
            torch.cuda.set_per_process_memory_fraction(1.0)  # comparing takes memory too
        load(host, folder / "checkpoint", on_cpu, engine="cpu", verify="full")
    wrong = [*differing(into, state), *differing(on_cpu, {name: tensor.cpu() for name, tensor in state.items()})]
    assert not wrong, wrong
    return {"warnings": warned, "ratio": writer.last_save.ratio}


def _limit_to(left_nbytes: int) -> None:
    """Let this process take so much more device memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + left_nbytes) / total)


def _little(host: Host, left_nbytes: int) -> Mapping[str, Any]:
    state = made_state(host.pick(256, 1) * MIB, host.torch_device)
    limit = host.pick(partial(_limit_to, left_nbytes), lambda: None)
    with on_the_engine(host, capacity_nbytes=left_nbytes // host.pick(1, 16)):
        return _saved_and_loaded(host, state, limit)


def _released(host: Host) -> Mapping[str, Any]:
    """Save and load, then give back the memory that is kept for the next save."""
    state = made_state(host.pick(256, 1) * MIB, host.torch_device)
    with on_the_engine(host) as memory:
        found = {"before": memory.taken(), **_saved_and_loaded(host, state, lambda: None)}
        found["kept"] = memory.taken()
        release_device_memory()
        if not host.stand_in:
            torch.cuda.empty_cache()
        found["released"] = _checked(memory, found["before"])
    return found


def _checked(memory: Memory, before: Mapping[str, float]) -> Mapping[str, float]:
    after = memory.taken()
    # the kernels' small tables stay, and torch's granularity is 20 MiB
    if after["reserved_mib"] > before["reserved_mib"] + 32:
        raise AssertionError(
            f"{after['reserved_mib']:.0f} MiB are reserved, before the save {before['reserved_mib']:.0f}"
        )
    return after
