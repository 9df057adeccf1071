"""How long a run has been under way: what rules count in that must not depend on machines' clocks.

    restored step's time, else that of the newest step -> + what this machine's monotonic clock has counted since

Each save has the time in its summary. What a job did after its last step, and what lay between jobs, is not in it.
"""

from __future__ import annotations

import time


class RunTime:
    """The time of a run, as one manager counts it."""

    def __init__(self, seconds: float | None) -> None:
        self.go_on_from(seconds)

    def go_on_from(self, seconds: float | None) -> None:
        """Count from here on, from the time of a step."""
        self._before_seconds, self._start_seconds = seconds or 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the run has been under way."""
        return self._before_seconds + time.monotonic() - self._start_seconds
