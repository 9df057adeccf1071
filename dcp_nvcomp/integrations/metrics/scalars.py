"""The numbers of a save or load that are worth a curve, by name."""

from __future__ import annotations

from collections.abc import Callable

from dcp_nvcomp.loading.stats import LoadStats
from dcp_nvcomp.saving.stats import SaveStats


def save_scalars(stats: SaveStats) -> dict[str, float]:
    """Return the numbers of a save."""
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
    return found


def load_scalars(stats: LoadStats) -> dict[str, float]:
    """Return the numbers of one rank's load."""
    found = {
        "seconds": stats.seconds,
        "bytes": float(stats.nbytes),
        "fetched_bytes": float(stats.fetched_nbytes),
        "items": float(stats.items),
    }
    if stats.seconds:
        found["bytes_per_second"] = stats.nbytes / stats.seconds
    return found


class StepCounter:
    """The step of each report: the caller's, or how many there were before.

    Args:
        step: returns the step of training; None to count reports.
    """

    def __init__(self, step: Callable[[], int] | None) -> None:
        self._step, self._counts = step, dict[str, int]()

    def next(self, kind: str) -> int:
        """Return the step of a report of this kind."""
        count = self._counts[kind] = self._counts.get(kind, -1) + 1
        return count if self._step is None else self._step()
