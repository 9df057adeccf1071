"""Step: `async_save` of a state on the GPU: how long training waits, and what is held in host memory meanwhile.

Before training has made a step, the state is encoded while it waits: only encoded bytes should cross to the host, so
that the wait is shorter than a copy of the state to pinned memory, by the ratio, but for a tenth. Later it is copied on
the GPU, if that has room. And a state that changes right after the call must not show in the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import State, made_state
from benchmarks.gpu_acceptance.results import AFTER_A_STEP, BEFORE_A_STEP, PLAIN_COPY, Probe
from benchmarks.gpu_acceptance.saving import budget, differing, left_to_the_cpu, load, on_the_engine, warnings_of
from benchmarks.gpu_device import host_memory
from benchmarks.measuring import Spread, available_nbytes
from benchmarks.peers import data_nbytes, remove
from benchmarks.staging import staged_by
from benchmarks.states import nbytes_of
from dcp_nvcomp import SaveStats, async_save

_NBYTES = 4 << 30
_REPEATS = 4
_OVERWRITTEN = 6


def probes(host: Host) -> Iterator[Probe]:
    trial = _Trial(host)
    yield PLAIN_COPY, trial.copied
    yield BEFORE_A_STEP, partial(trial.saved, BEFORE_A_STEP, "staged")
    yield AFTER_A_STEP, partial(trial.saved_later, AFTER_A_STEP, "staged")
    yield 'async_save, wait="nothing"', partial(trial.saved_later, 'async_save, wait="nothing"', "nothing")
    yield "overwritten at once", trial.overwritten


class _Trial:
    """One state in one process, and what was measured of it.

    Args:
        host: where.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stack = ExitStack()
        self._state: State = {}
        self._copies: list[float] = []

    def _begin(self) -> tuple[State, Path]:
        if not self._state:
            nbytes = min(self._host.pick(_NBYTES, 3 * MIB), available_nbytes() // 8)
            self._stack.enter_context(on_the_engine(self._host))
            self._path = self._stack.enter_context(self._host.files_in_memory(2 * nbytes)) / "checkpoint"
            self._state = made_state(nbytes, self._host.torch_device)
        return self._state, self._path

    def copied(self) -> Mapping[str, Any]:
        """Copy the state to pinned memory that is there."""
        seconds, nbytes = self._copy_seconds(), nbytes_of(self._state)
        return self._row(PLAIN_COPY, seconds, seconds, nbytes, nbytes)

    def _copy_seconds(self) -> list[float]:
        if self._copies:
            return self._copies
        state, _ = self._begin()
        pinned = {name: host_memory(tensor.nbytes, self._host.torch_device) for name, tensor in state.items()}
        seconds = []
        for _ in range(1 + self._host.pick(_REPEATS, 1)):
            self._host.synchronize()
            start = time.perf_counter()
            for name, tensor in state.items():
                pinned[name].copy_(tensor.view(torch.uint8).reshape(-1), non_blocking=True)
            self._host.synchronize()
            seconds.append(time.perf_counter() - start)
        self._copies = seconds[1:]
        return self._copies

    def saved_later(self, how: str, wait: str) -> Mapping[str, Any]:
        """Save it after a step, which takes memory for a while."""
        state, _ = self._begin()
        torch.empty(nbytes_of(state) // 4, dtype=torch.uint8, device=self._host.torch_device)
        return self.saved(how, wait)

    def saved(self, how: str, wait: str) -> Mapping[str, Any]:
        """Save it; the first save finds no memory that is kept."""
        state, path = self._begin()
        stalls, staged, stats = [], [], None
        with warnings_of() as warned:
            for _ in range(1 + self._host.pick(_REPEATS, 1)):
                remove(path)
                self._host.synchronize()
                start = time.perf_counter()
                saving = self._async_save(state, path, wait)
                stalls.append(time.perf_counter() - start)
                saving.staging_completion.result()
                staged.append(time.perf_counter() - start)
                stats = SaveStats.of(saving.upload_completion.result())
        left_to_the_cpu(warned)
        assert stats is not None
        stored_nbytes = data_nbytes(path)
        is_copied = stats.staged_nbytes == nbytes_of(state)
        if stats.staged_nbytes > stored_nbytes and not is_copied:
            raise AssertionError(f"{stats.staged_nbytes} bytes were staged of {stored_nbytes} that are stored")
        found = self._row(how, stalls[1:], staged[1:], nbytes_of(state), stats.staged_nbytes)
        return {**found, "is_copied": is_copied, "first_stall_seconds": stalls[0], "warnings": warned}

    def overwritten(self) -> Mapping[str, Any]:
        """Change the state right after each call, on the caller's stream, and compare what was saved."""
        state, path = self._begin()
        into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        turns = self._host.pick(_OVERWRITTEN, 2)
        for turn in range(turns):
            expected = {name: tensor.clone() for name, tensor in state.items()}
            remove(path)
            saving = self._async_save(state, path, "staged")
            for tensor in state.values():
                tensor.neg_()
            saving.upload_completion.result()
            load(self._host, path, into, engine="auto")
            wrong = differing(into, expected)
            if wrong:
                raise AssertionError(f"save {turn} holds other values than the state had: {wrong[:8]}")
        return {"saves": turns}

    def _async_save(self, state: State, path: Path, wait: str) -> Any:
        options = {"engine": "auto", "sync_files": False, **budget(self._host)}
        # the stand-in's tensors are in host memory, which would be copied
        with staged_by("encode"):
            return async_save(state, path, no_dist=True, wait=wait, **options)

    def _row(
        self, how: str, stalls: list[float], staged: list[float], nbytes: int, staged_nbytes: int
    ) -> Mapping[str, Any]:
        stall, ratio = Spread(tuple(stalls)), nbytes / staged_nbytes
        row = {
            "how": how,
            "stall": stall,
            "staged": Spread(tuple(staged)),
            "ratio": ratio,
            "gain": Spread(tuple(self._copy_seconds())).median / (stall.median * ratio),
        }
        return {"nbytes": nbytes, "rows": {"asynchronous": [row]}}
