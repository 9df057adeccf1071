"""Whole saves and loads of the sample state at the storage: what the parts do to each other, and what they do not show.

Encoding and writing share cores, caches and memory, a server on this machine takes its part too, and a save has costs
that do not grow with it: planning, opening, publishing. A trial measures all of that at once; model.py makes a save of
any other size from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_nvcomp.choosing.codec_rates import repeated_seconds
from dcp_nvcomp.choosing.storage_rates import forget_cached, removing
from dcp_nvcomp.loading.load import load
from dcp_nvcomp.saving.save import save
from dcp_nvcomp.saving.stats import SaveStats
from dcp_nvcomp.storage.base import Filesystem

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """Median times of whole saves and loads with one codec.

    Attributes:
        codec: its name.
        nbytes: size of the state.
        ratio: uncompressed over stored size.
        save_seconds: time of a save.
        load_seconds: time of a load.
        empty_save_seconds: time of a save of next to nothing: what does not grow with the state.
        empty_load_seconds: the same of a load.
    """

    codec: str
    nbytes: int
    ratio: float
    save_seconds: float
    load_seconds: float
    empty_save_seconds: float
    empty_load_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return dict(vars(self))


def run_trial(
    filesystem: Filesystem,
    path: str,
    state: State,
    codec: str,
    *,
    threads: int,
    seconds: float,
    storage_options: Mapping[str, Any],
) -> Trial:
    """Save and load a state several times."""
    trial = _Trial(filesystem, path, codec, threads, storage_options)
    little = {"w": torch.zeros(1)}
    empty_save, empty_load, _ = trial.run(little, seconds / 8)
    full_save, full_load, stats = trial.run(state, seconds * 7 / 8)
    return Trial(codec, stats.uncompressed_nbytes, stats.ratio, full_save, full_load, empty_save, empty_load)


class _Trial:
    def __init__(self, filesystem: Filesystem, path: str, codec: str, threads: int, options: Mapping[str, Any]) -> None:
        self._filesystem, self._path, self._codec = filesystem, path, codec
        self._shared = {"thread_count": threads, **options}

    def run(self, state: State, seconds: float) -> tuple[float, float, SaveStats]:
        into = {name: torch.empty_like(tensor).fill_(0) for name, tensor in state.items()}
        with removing(self._clear):
            saved = repeated_seconds(lambda: self._save(state), seconds * 2 / 3, before=self._clear)
            self._clear()
            stats = self._save(state)
            files = list(stats.files)
            loaded = repeated_seconds(
                lambda: self._load(into), seconds / 3, before=lambda: forget_cached(self._filesystem, files)
            )
        return saved, loaded, stats

    def _clear(self) -> None:
        """Remove the checkpoint: a save that replaces one has to remove it, too."""
        self._filesystem.remove(self._filesystem.list_names())

    def _save(self, state: State) -> SaveStats:
        metadata = save(dict(state), self._path, no_dist=True, codec=self._codec, **self._shared)
        stats = SaveStats.of(metadata)
        assert stats is not None
        return stats

    def _load(self, into: dict[str, torch.Tensor]) -> None:
        load(into, self._path, no_dist=True, **self._shared)
