"""The progress of a save or load: a bar of tqdm on a terminal, elsewhere a line in the log every ten seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


class ProgressBar:
    """Counts bytes. Several threads may update it."""

    def __init__(self, what: str, total_nbytes: int, *, enabled: bool) -> None:
        self._what, self._total_nbytes, self._enabled = what, total_nbytes, enabled
        self._bar: Any = None
        self._lock = threading.Lock()
        self._done_nbytes = 0
        self._began_seconds = self._told_seconds = time.monotonic()
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_nbytes, unit="B", unit_scale=True, desc=what, file=sys.stderr, leave=False)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._enabled:
            self._log(nbytes)

    def _log(self, nbytes: int) -> None:
        with self._lock:
            self._done_nbytes += nbytes
            now = time.monotonic()
            if now - self._told_seconds < _LOG_SECONDS:
                return
            self._told_seconds, done = now, self._done_nbytes
        rate = done / (now - self._began_seconds) / 1e6
        logger.info("%s: %.2f of %.2f GB, %.0f MB/s", self._what, done / 1e9, self._total_nbytes / 1e9, rate)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def report_to(callback: Callable[[Any], None] | None, stats: object, *, done: str, name: str) -> None:
    """Call back after a save or load; nothing here may make it look as if it had failed."""
    if callback is not None:
        try:
            callback(stats)
        except Exception as error:
            message = f"The checkpoint is {done}, but {name} raised {type(error).__name__}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
