"""Step: a large state to and from files in memory, beside stock DCP, and beside a plain copy to pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import State, made_state
from benchmarks.gpu_acceptance.results import PLAIN_COPY, Probe
from benchmarks.gpu_acceptance.saving import budget, left_to_the_cpu, on_the_engine, warnings_of
from benchmarks.gpu_checkpoints import Way, measure, way_of
from benchmarks.gpu_device import host_memory
from benchmarks.measuring import Spread, available_nbytes, core_count
from benchmarks.peers import ours, stock
from benchmarks.states import nbytes_of
from dcp_nvcomp import NvcompWriter

_NBYTES = 4 << 30
_REPEATS = 2


def probes(host: Host) -> Iterator[Probe]:
    states = cache(partial(_states, host))
    threads = core_count()
    ways: dict[str, Callable[[], Way]] = {
        PLAIN_COPY: lambda: _pinned(host, states()[0]),
        "dcp_nvcomp": lambda: way_of(ours(threads, **budget(host))),
        "dcp": lambda: way_of(stock(threads)),
        "dcp_nvcomp, encodes not checked": lambda: _unchecked(host, threads),
        "dcp_nvcomp, ans": lambda: way_of(ours(threads, codec="ans")),
        # last: nvCOMP's Deflate codes 2 GB/s
        "dcp_nvcomp, planes-deflate": lambda: way_of(ours(threads, codec="planes-deflate", **budget(host))),
    }
    for name, way in ways.items():
        if host.stand_in and name.endswith("ans"):
            continue  # nothing but a GPU is asked for it
        yield name, partial(_measured, host, states, name, way)


def _states(host: Host) -> tuple[State, State]:
    """Return the state and what it is loaded into, smaller if there is no memory for files and pinned copies of it."""
    nbytes = min(host.pick(_NBYTES, 3 * MIB), available_nbytes() // 4)
    state = made_state(nbytes, host.torch_device)
    return state, {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _unchecked(host: Host, threads: int) -> Way:
    """Return the way that does not check what the GPU encoded."""
    peer = ours(threads, **budget(host))
    options = {"thread_count": threads, "check_encodes": "off", **budget(host)}
    return way_of(replace(peer, writer=lambda path: NvcompWriter(path, **options)))


def _pinned(host: Host, state: State) -> Way:
    """Return the way that neither encodes nor writes."""
    pinned = {name: host_memory(tensor.nbytes, host.torch_device) for name, tensor in state.items()}

    def copied(path: Path, given: State) -> None:
        for name, tensor in given.items():
            pinned[name].copy_(tensor.view(torch.uint8).reshape(-1), non_blocking=True)
        host.synchronize()
        path.mkdir()

    def back(path: Path, into: State) -> None:
        for name, tensor in into.items():
            tensor.view(torch.uint8).reshape(-1).copy_(pinned[name], non_blocking=True)
        host.synchronize()

    return Way(copied, back)


def _measured(
    host: Host, states: Callable[[], tuple[State, State]], name: str, make: Callable[[], Way]
) -> Mapping[str, Any]:
    (state, into), way = states(), make()
    nbytes = nbytes_of(state)
    with host.files_in_memory(2 * nbytes) as folder, on_the_engine(host), warnings_of() as warned:
        in_memory = folder.is_relative_to("/dev/shm")
        for repeat in range(-1, host.pick(_REPEATS, 1)):
            measure(way, name, folder / "checkpoint", state, into, warm=repeat >= 0)
    left_to_the_cpu(warned)
    saved, loaded = Spread(tuple(way.save_seconds)), Spread(tuple(way.load_seconds))
    row = {
        "writer": name,
        "ratio": nbytes / way.stored_nbytes if way.stored_nbytes else 1.0,
        "save_seconds": saved,
        "load_seconds": loaded,
        "save_rate": saved.rate(nbytes / 1e9),
        "load_rate": loaded.rate(nbytes / 1e9),
        "save_peak_mib": way.save_peak_nbytes / MIB,
        "load_peak_mib": way.load_peak_nbytes / MIB,
    }
    return {"nbytes": nbytes, "in_memory": in_memory, "warnings": warned, "rows": {"checkpoints": [row]}}
