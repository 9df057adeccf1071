"""The progress bar of a save: tqdm on a terminal, nothing otherwise."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

__all__ = ["ProgressBar"]


class ProgressBar:
    """A bar that counts bytes. Several threads may update it.

    Args:
        total_nbytes: the size that counts as 100 %.
        enabled: if True, the bar is drawn, provided that standard error is a terminal.
    """

    def __init__(self, total_nbytes: int, *, enabled: bool) -> None:
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_nbytes, unit="B", unit_scale=True, desc="saving", file=sys.stderr, leave=False)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, nbytes: int) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
