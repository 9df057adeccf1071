"""Step: twenty saves and loads of the same state. The twentieth must leave no more memory reserved than the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import made_state
from benchmarks.gpu_acceptance.results import Probe
from benchmarks.gpu_acceptance.saving import differing, load, on_the_engine, save, warnings_of
from benchmarks.peers import remove
from dcp_nvcomp.engines.cuda.pool import release_device_memory

_TURNS = 20


def probes(host: Host) -> Iterator[Probe]:
    repeats = _Repeats(host)
    for turn in range(1, host.pick(_TURNS, 3) + 1):
        yield f"save and load {turn}", partial(repeats.turn, turn)
    yield "afterwards", repeats.afterwards


class _Repeats:
    """Saves and loads of one state in one process, and the memory after each.

    Args:
        host: where.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stack = ExitStack()
        self._reserved: list[float] = []
        self._before: Mapping[str, float] = {}

    def _begin(self) -> None:
        host = self._host
        self._memory = self._stack.enter_context(on_the_engine(host))
        self._path = self._stack.enter_context(host.files_in_memory(1 << 30)) / "checkpoint"
        self._state = made_state(host.pick(512, 1) * MIB, host.torch_device)
        self._into = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        self._before = self._memory.taken()

    def turn(self, turn: int) -> Mapping[str, Any]:
        """Save and load once more."""
        if not self._before:
            self._begin()
        for tensor in self._into.values():
            tensor.zero_()
        with warnings_of() as warned:
            save(self._host, self._path, self._state, engine="auto")
            load(self._host, self._path, self._into, engine="auto")
        self._host.synchronize()
        taken = self._memory.taken()
        self._reserved.append(taken["reserved_mib"])
        remove(self._path)
        wrong = differing(self._into, self._state)
        if wrong or warned:
            raise AssertionError(f"wrong: {wrong}; warnings: {warned}")
        return {"rows": {"repeats": [{"turn": turn, **taken}]}}

    def afterwards(self) -> Mapping[str, Any]:
        """Give the memory back, and compare the last turn with the second: the first tests and compiles besides."""
        release_device_memory()
        if not self._host.stand_in:
            torch.cuda.empty_cache()
        found = {"before": self._before, "after release_device_memory": self._memory.taken()}
        self._stack.close()
        if self._reserved[-1] > self._reserved[min(1, len(self._reserved) - 1)]:
            return {"status": "failed", "error": f"reserved in turn, MiB: {self._reserved}", **found}
        return found
