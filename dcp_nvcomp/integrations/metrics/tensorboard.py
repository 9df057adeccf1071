"""TensorBoard: one scalar for each number of a save or load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dcp_nvcomp.integrations.metrics.scalars import StepCounter, load_scalars, save_scalars
from dcp_nvcomp.loading.stats import LoadStats
from dcp_nvcomp.saving.stats import SaveStats


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class TensorBoard:
    """Write statistics as scalars `checkpoint/save/...` and `checkpoint/load/...`.

    Args:
        writer: a `SummaryWriter` of torch.utils.tensorboard, or another object with its `add_scalar`.
        step: returns the step of training; by default saves and loads are counted.
    """

    def __init__(self, writer: _Writer, *, step: Callable[[], int] | None = None) -> None:
        self._writer = writer
        self._steps = StepCounter(step)

    def on_save(self, stats: SaveStats) -> None:
        """Write the statistics of a save."""
        self._write("save", save_scalars(stats))

    def on_load(self, stats: LoadStats) -> None:
        """Write the statistics of a load."""
        self._write("load", load_scalars(stats))

    def _write(self, kind: str, scalars: dict[str, float]) -> None:
        step = self._steps.next(kind)
        for name, value in scalars.items():
            self._writer.add_scalar(f"checkpoint/{kind}/{name}", value, step)
