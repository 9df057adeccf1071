"""OpenTelemetry: histograms and counters of a meter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.loading.stats import LoadStats
from dcp_nvcomp.saving.stats import SaveStats

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


class OpenTelemetry:
    """Record saves and loads, as `dcp_nvcomp.save...` and `dcp_nvcomp.load...`, times in seconds and sizes in bytes.

    Args:
        meter: where; by default that of the global meter provider, by the name `dcp_nvcomp`.

    Raises:
        ConfigurationError: no meter was given, and opentelemetry-api is not installed.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        meter = _global_meter() if meter is None else meter
        self._saves = meter.create_histogram("dcp_nvcomp.save.duration", "s", "Time from planning to commit.")
        self._stages = meter.create_histogram(
            "dcp_nvcomp.save.stage.duration", "s", "Time in one stage, of the slowest rank."
        )
        self._stalls = meter.create_histogram("dcp_nvcomp.save.stall", "s", "How long training waited.")
        self._ratio = meter.create_histogram("dcp_nvcomp.save.ratio", "1", "Uncompressed over stored size.")
        self._uncompressed = meter.create_counter("dcp_nvcomp.save.uncompressed", "By", "Size of the state in memory.")
        self._stored = meter.create_counter("dcp_nvcomp.save.stored", "By", "Size of the data files.")
        self._recoded = meter.create_counter("dcp_nvcomp.save.recoded", "{block}", "Blocks that a GPU got wrong.")
        self._loads = meter.create_histogram("dcp_nvcomp.load.duration", "s", "Time of one rank's load.")
        self._loaded = meter.create_counter("dcp_nvcomp.load.filled", "By", "Size of the tensors filled.")
        self._fetched = meter.create_counter("dcp_nvcomp.load.fetched", "By", "What was read of data files.")

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


def _global_meter() -> Meter:
    try:
        from opentelemetry.metrics import get_meter
    except ImportError as error:
        raise ConfigurationError("OpenTelemetry() needs opentelemetry-api: pip install opentelemetry-api.") from error
    return get_meter("dcp_nvcomp")
