"""`torch_checkpointing`: its manager with its own storage and with ours, one rank, in memory and over a link.

"stall" is how long `save` keeps its caller, "durable" until its future resolves, "load" a whole load into tensors of
its own. Its own storage does not sync files, and `O_DIRECT` is off, which most file systems refuse it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import NotHere, Settings, Spread, core_count, paired
from benchmarks.results import Report
from benchmarks.states import State, assert_same, build_state, nbytes_of
from benchmarks.torch_checkpointing_peer import is_installed

_LINK_RATE = 500e6
_PLACES = {"memory": None, "link of 500 MB/s": _LINK_RATE}
_OWN, _OURS = "its own", "NvcompStorageConfig"

if is_installed():
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    from benchmarks.torch_checkpointing_peer import LimitedConfig
    from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig

    class _OurConfig(NvcompStorageConfig):
        """Ours; that it is of this module registers `limited://` in the process that writes."""


class _Manager:
    """A manager with one of the storages, and its last checkpoint; the library's own storage takes whole paths."""

    def __init__(self, storage: str, place: Path, rate: float | None) -> None:
        config: Any
        place.mkdir()
        if storage == _OWN:
            local = LocalFileSystemStorageConfig(use_direct_io=False)
            config = local if rate is None else LimitedConfig(use_direct_io=False, rate=rate)
        elif rate is None:
            config = _OurConfig(place)
        else:
            config = _OurConfig(f"limited://{place}", storage_options={"rate": rate})
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        save = AsyncCheckpointSaverConfig(staging_config=staging)
        self.manager = CheckpointManager.Config(save=save, storage_config=config).build()
        self._root, self._is_relative, self._saves = place, rate is not None and storage == _OURS, 0

    @property
    def _name(self) -> str:
        return f"step-{self._saves}"

    @property
    def _id(self) -> str:
        return self._name if self._is_relative else os.fspath(self._root / self._name)

    def save(self, state: State) -> tuple[float, float]:
        """Return the seconds of the stall, and until it is durable."""
        shutil.rmtree(self._root / self._name, ignore_errors=True)
        self._saves += 1
        start = time.perf_counter()
        future = self.manager.save(self._id, {"state": state})
        stall = time.perf_counter() - start
        assert future is not None
        future.result()
        return stall, time.perf_counter() - start

    def load(self, state: State) -> float:
        into = {key: torch.empty_like(tensor) for key, tensor in state.items()}
        start = time.perf_counter()
        loaded = self.manager.load(self._id, into={"state": into})
        spent = time.perf_counter() - start
        assert_same(dict(loaded["state"]), state, "load")
        return spent

    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in (self._root / self._name).rglob("*") if file.is_file())


def run(settings: Settings) -> Report:
    if not is_installed():
        raise NotHere("torch_checkpointing is not installed: pip install --no-deps torch_checkpointing==0.1.1")
    report = Report("torch_checkpointing", settings)
    state, repeats = build_state(settings.nbytes_or(400_000_000), settings.state), settings.repeats_or(7)
    table = report.table(
        "saves",
        f"{nbytes_of(state) / 1e6:.0f} MB on {core_count()} cores: median (lowest-highest) of {repeats}",
        place=("place", ""),
        storage=("storage", ""),
        stall=("stall, ms", ".2f"),
        durable=("durable, s", ".3f"),
        load=("load, s", ".3f"),
        ratio=("ratio", ".3f"),
    )
    for name, rate in _PLACES.items():
        settings.say(name)
        with settings.scratch() as scratch:
            found = _measured(scratch, rate, state, repeats)
        for storage, (stalls, durables, loads, ratio) in found.items():
            table.add(place=name, storage=storage, stall=stalls.scaled(1e3), durable=durables, load=loads, ratio=ratio)
        own, ours = found[_OWN], found[_OURS]
        added = Spread(tuple(a - b for a, b in zip(ours[0].values, own[0].values, strict=True)))
        report.at_most(f"{name}: ms that the stall is longer", added.median * 1e3, 0.2)
        report.at_most(f"{name}: durable over its own", paired(ours[1], own[1]).median, 1.1 if rate is None else 0.85)
        report.at_most(f"{name}: load over its own", paired(ours[2], own[2]).median, 1.5 if rate is None else 0.9)
    return report


def _measured(
    scratch: Path, rate: float | None, state: State, repeats: int
) -> dict[str, tuple[Spread, Spread, Spread, float]]:
    managers = {storage: _Manager(storage, scratch / str(at), rate) for at, storage in enumerate((_OWN, _OURS))}
    seconds: dict[str, list[tuple[float, float, float]]] = {storage: [] for storage in managers}
    ratios = {}
    for repeat in range(-1, repeats):  # in turn; the first is a warm-up
        for storage, manager in managers.items():
            spent = (*manager.save(state), manager.load(state))
            ratios[storage] = nbytes_of(state) / manager.nbytes()
            if repeat >= 0:
                seconds[storage].append(spent)
    for manager in managers.values():
        manager.manager.close()
    return {
        storage: (Spread(tuple(a)), Spread(tuple(b)), Spread(tuple(c)), ratios[storage])
        for storage, found in seconds.items()
        for a, b, c in [zip(*found, strict=True)]
    }
