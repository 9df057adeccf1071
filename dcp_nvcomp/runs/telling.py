"""Who is told what a manager does: its report, the log, and the user's callback."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dcp_nvcomp.runs.events import Event, RunReport

logger = logging.getLogger(__name__)


class Telling:
    """Tells of events, from any thread."""

    def __init__(self, on_event: Callable[[Event], None] | None, *, logs: bool) -> None:
        self._on_event, self._logs = on_event, logs
        self._report, self._lock = RunReport(), threading.Lock()

    def tell(self, event: Event) -> None:
        """Tell of an event."""
        with self._lock:
            self._report = self._report.after(event)
        if self._logs:
            logger.info("%s", event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception as error:
                logger.error("on_event raised %s: %s", type(error).__name__, error)

    def report(self) -> RunReport:
        """Return what was told so far."""
        with self._lock:
            return self._report
