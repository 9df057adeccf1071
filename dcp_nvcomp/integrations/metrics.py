"""Metrics of saves and loads for what a job is watched with: objects with `on_save` and `on_load`.

`on_save` is called on the coordinator with the statistics of all ranks, `on_load` on each rank with its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.loading.job import LoadStats
from dcp_nvcomp.saving.stats import SaveStats

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from prometheus_client import CollectorRegistry

__all__ = ["OpenTelemetry", "Prometheus", "TensorBoard", "WeightsAndBiases"]

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


def _save_scalars(stats: SaveStats) -> dict[str, float]:
    found = {
        "seconds": stats.total_seconds,
        **{f"{stage}_seconds": seconds for stage, seconds in stats.seconds.items()},
        "stall_seconds": stats.stall_seconds,
        "uncompressed_bytes": float(stats.uncompressed_nbytes),
        "stored_bytes": float(stats.stored_nbytes),
        "ratio": stats.ratio,
        "recoded_blocks": float(stats.recoded_blocks),
    }
    if stats.total_seconds:
        found["bytes_per_second"] = stats.uncompressed_nbytes / stats.total_seconds
    return {f"checkpoint/save/{name}": value for name, value in found.items()}


def _load_scalars(stats: LoadStats) -> dict[str, float]:
    found = {
        "seconds": stats.seconds,
        "bytes": float(stats.nbytes),
        "fetched_bytes": float(stats.fetched_nbytes),
        "items": float(stats.items),
    }
    if stats.seconds:
        found["bytes_per_second"] = stats.nbytes / stats.seconds
    return {f"checkpoint/load/{name}": value for name, value in found.items()}


def _imported(module: str, needed_by: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{needed_by}() needs {package}: pip install {package}.") from error


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class _Run(Protocol):
    @property
    def log(self) -> Callable[..., object]: ...


class _Scalars:
    def on_save(self, stats: SaveStats) -> None:
        """Write the statistics of a save."""
        self._write("save", _save_scalars(stats))

    def on_load(self, stats: LoadStats) -> None:
        """Write the statistics of a load."""
        self._write("load", _load_scalars(stats))

    def _write(self, kind: str, scalars: dict[str, float]) -> None:
        raise NotImplementedError


class TensorBoard(_Scalars):
    """Write statistics as scalars `checkpoint/save/...` and `checkpoint/load/...`.

    Args:
        writer: a `SummaryWriter` of torch.utils.tensorboard, or another object with its `add_scalar`.
        step: returns the step of training; by default saves and loads are counted.
    """

    def __init__(self, writer: _Writer, *, step: Callable[[], int] | None = None) -> None:
        self._writer, self._step = writer, step
        self._counts: Counter[str] = Counter()

    def _write(self, kind: str, scalars: dict[str, float]) -> None:
        step = self._counts[kind] if self._step is None else self._step()
        self._counts[kind] += 1
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases(_Scalars):
    """Log statistics as `checkpoint/save/...` and `checkpoint/load/...`.

    Args:
        run: what `wandb.init` returned, or another object with its `log`; by default the module `wandb` itself, which
            logs to the run that was begun last.
        step: returns the step of training, which must not be less than that of the last `log`; by default wandb counts.

    Raises:
        ConfigurationError: no run was given, and wandb is not installed.
    """

    def __init__(self, run: _Run | None = None, *, step: Callable[[], int] | None = None) -> None:
        self._run = _imported("wandb", "WeightsAndBiases", "wandb") if run is None else run
        self._step = step

    def _write(self, kind: str, scalars: dict[str, float]) -> None:
        self._run.log(scalars, **({} if self._step is None else {"step": self._step()}))


class OpenTelemetry:
    """Record saves and loads, as `dcp_nvcomp.save...` and `dcp_nvcomp.load...`, times in seconds and sizes in bytes.

    Args:
        meter: where; by default that of the global meter provider, by the name `dcp_nvcomp`.

    Raises:
        ConfigurationError: no meter was given, and opentelemetry-api is not installed.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        if meter is None:
            meter = _imported("opentelemetry.metrics", "OpenTelemetry", "opentelemetry-api").get_meter("dcp_nvcomp")
        histogram, counter = meter.create_histogram, meter.create_counter
        self._saves = histogram("dcp_nvcomp.save.duration", "s", "Time from planning to commit.")
        self._stages = histogram("dcp_nvcomp.save.stage.duration", "s", "Time in one stage, of the slowest rank.")
        self._stalls = histogram("dcp_nvcomp.save.stall", "s", "How long training waited.")
        self._ratio = histogram("dcp_nvcomp.save.ratio", "1", "Uncompressed over stored size.")
        self._uncompressed = counter("dcp_nvcomp.save.uncompressed", "By", "Size of the state in memory.")
        self._stored = counter("dcp_nvcomp.save.stored", "By", "Size of the data files.")
        self._recoded = counter("dcp_nvcomp.save.recoded", "{block}", "Blocks that a GPU got wrong.")
        self._loads = histogram("dcp_nvcomp.load.duration", "s", "Time of one rank's load.")
        self._loaded = counter("dcp_nvcomp.load.filled", "By", "Size of the tensors filled.")
        self._fetched = counter("dcp_nvcomp.load.fetched", "By", "What was read of data files.")

    def on_save(self, stats: SaveStats) -> None:
        """Record a save."""
        self._saves.record(stats.total_seconds)
        for stage, seconds in stats.seconds.items():
            self._stages.record(seconds, {"stage": stage})
        self._stalls.record(stats.stall_seconds)
        self._ratio.record(stats.ratio)
        self._uncompressed.add(stats.uncompressed_nbytes)
        self._stored.add(stats.stored_nbytes)
        self._recoded.add(stats.recoded_blocks)

    def on_load(self, stats: LoadStats) -> None:
        """Record a load."""
        self._loads.record(stats.seconds)
        self._loaded.add(stats.nbytes)
        self._fetched.add(stats.fetched_nbytes)


class Prometheus:
    """Count saves and loads in a registry, as `dcp_nvcomp_...`. Make one of them for each registry.

    Of a checkpoint's path nothing becomes a label: each step would be a time series of its own.

    Args:
        registry: where; by default that of prometheus-client, which `start_http_server` serves.

    Raises:
        ConfigurationError: prometheus-client is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        package = _imported("prometheus_client", "Prometheus", "prometheus-client")
        where = package.REGISTRY if registry is None else registry

        def made(kind: str, name: str, text: str, **options: Any) -> Any:
            return getattr(package, kind)(f"dcp_nvcomp_{name}", text, registry=where, **options)

        self._saves = made("Histogram", "save_seconds", "Time of saves, from planning to commit.", buckets=_SECONDS)
        self._stages = made(
            "Counter", "save_stage_seconds", "Time in a stage of saves, of the slowest rank.", labelnames=["stage"]
        )
        self._stalls = made("Counter", "save_stall_seconds", "Time that asynchronous saves kept training waiting.")
        self._uncompressed = made("Counter", "saved_uncompressed_bytes", "Size of saved states in memory.")
        self._stored = made("Counter", "saved_stored_bytes", "Size of the data files written.")
        self._recoded = made(
            "Counter", "recoded_blocks", "Blocks that a GPU encoded to wrong bytes, and the CPU again."
        )
        self._ratio = made("Gauge", "last_save_ratio", "Ratio of the last save.")
        self._time = made("Gauge", "last_save_timestamp_seconds", "When the last save was reported.")
        self._loads = made("Histogram", "load_seconds", "Time of loads.", buckets=_SECONDS)
        self._loaded = made("Counter", "loaded_bytes", "Size of the tensors filled.")
        self._fetched = made("Counter", "fetched_bytes", "What was read of data files.")

    def on_save(self, stats: SaveStats) -> None:
        """Count a save."""
        self._saves.observe(stats.total_seconds)
        for stage, seconds in stats.seconds.items():
            self._stages.labels(stage).inc(seconds)
        self._stalls.inc(stats.stall_seconds)
        self._uncompressed.inc(stats.uncompressed_nbytes)
        self._stored.inc(stats.stored_nbytes)
        self._recoded.inc(stats.recoded_blocks)
        self._ratio.set(stats.ratio)
        self._time.set(time.time())

    def on_load(self, stats: LoadStats) -> None:
        """Count a load."""
        self._loads.observe(stats.seconds)
        self._loaded.inc(stats.nbytes)
        self._fetched.inc(stats.fetched_nbytes)
