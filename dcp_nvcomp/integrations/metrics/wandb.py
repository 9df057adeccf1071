"""Weights & Biases: one `log` for each save or load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.integrations.metrics.scalars import load_scalars, save_scalars
from dcp_nvcomp.loading.stats import LoadStats
from dcp_nvcomp.saving.stats import SaveStats


class _Run(Protocol):
    @property
    def log(self) -> Callable[..., object]: ...


class WeightsAndBiases:
    """Log statistics as `checkpoint/save/...` and `checkpoint/load/...`.

    Args:
        run: what `wandb.init` returned, or another object with its `log`; by default the module `wandb` itself, which
            logs to the run that was begun last.
        step: returns the step of training, which must not be less than that of the last `log`; by default wandb counts.

    Raises:
        ConfigurationError: no run was given, and wandb is not installed.
    """

    def __init__(self, run: _Run | None = None, *, step: Callable[[], int] | None = None) -> None:
        self._run = _module() if run is None else run
        self._step = step

    def on_save(self, stats: SaveStats) -> None:
        """Log the statistics of a save."""
        self._log("save", save_scalars(stats))

    def on_load(self, stats: LoadStats) -> None:
        """Log the statistics of a load."""
        self._log("load", load_scalars(stats))

    def _log(self, kind: str, scalars: Mapping[str, float]) -> None:
        values = {f"checkpoint/{kind}/{name}": value for name, value in scalars.items()}
        if self._step is None:
            self._run.log(values)
        else:
            self._run.log(values, step=self._step())


def _module() -> Any:
    try:
        return import_module("wandb")
    except ImportError as error:
        raise ConfigurationError("WeightsAndBiases() needs wandb: pip install wandb, or pass a run.") from error
