"""Metrics of saves and loads for what a job is watched with: objects with `on_save` and `on_load`.

    metrics = TensorBoard(SummaryWriter("runs/a"), step=lambda: trainer.step)
    save(state, path, on_save=metrics.on_save)
    load(state, path, on_load=metrics.on_load)

`on_save` is called on the coordinator with the statistics of all ranks, `on_load` on each rank with its own. Each class
takes a writer, meter, registry or run of the package that it is for, which is imported only if it has to make one.

    TensorBoard        torch.utils.tensorboard, or any object with `add_scalar`
    OpenTelemetry      opentelemetry-api
    Prometheus         prometheus-client
    WeightsAndBiases   wandb, or any object with `log`
"""

from __future__ import annotations

from dcp_nvcomp.integrations.metrics.opentelemetry import OpenTelemetry
from dcp_nvcomp.integrations.metrics.prometheus import Prometheus
from dcp_nvcomp.integrations.metrics.tensorboard import TensorBoard
from dcp_nvcomp.integrations.metrics.wandb import WeightsAndBiases

__all__ = ["OpenTelemetry", "Prometheus", "TensorBoard", "WeightsAndBiases"]
