"""Prometheus: counters and histograms over all saves and loads, gauges of the last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.loading.stats import LoadStats
from dcp_nvcomp.saving.stats import SaveStats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class Prometheus:
    """Count saves and loads in a registry, as `dcp_nvcomp_...`. Make one of them for each registry.

    Of a checkpoint's path nothing becomes a label: each step would be a time series of its own.

    Args:
        registry: where; by default that of prometheus-client, which `start_http_server` serves.

    Raises:
        ConfigurationError: prometheus-client is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise ConfigurationError("Prometheus() needs prometheus-client: pip install prometheus-client.") from error
        where = REGISTRY if registry is None else registry
        self._saves = Histogram(
            "dcp_nvcomp_save_seconds", "Time of saves, from planning to commit.", buckets=_SECONDS, registry=where
        )
        self._stages = Counter(
            "dcp_nvcomp_save_stage_seconds", "Time in a stage of saves, of the slowest rank.", ["stage"], registry=where
        )
        self._stalls = Counter(
            "dcp_nvcomp_save_stall_seconds", "Time that asynchronous saves kept training waiting.", registry=where
        )
        self._uncompressed = Counter(
            "dcp_nvcomp_saved_uncompressed_bytes", "Size of saved states in memory.", registry=where
        )
        self._stored = Counter("dcp_nvcomp_saved_stored_bytes", "Size of the data files written.", registry=where)
        self._recoded = Counter(
            "dcp_nvcomp_recoded_blocks", "Blocks that a GPU encoded to wrong bytes, and the CPU again.", registry=where
        )
        self._ratio = Gauge("dcp_nvcomp_last_save_ratio", "Ratio of the last save.", registry=where)
        self._time = Gauge("dcp_nvcomp_last_save_timestamp_seconds", "When the last save was reported.", registry=where)
        self._loads = Histogram("dcp_nvcomp_load_seconds", "Time of loads.", buckets=_SECONDS, registry=where)
        self._loaded = Counter("dcp_nvcomp_loaded_bytes", "Size of the tensors filled.", registry=where)
        self._fetched = Counter("dcp_nvcomp_fetched_bytes", "What was read of data files.", registry=where)

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
