"""Preemption: a signal to any rank becomes a decision of all ranks at the same step.

A rank that is told to go only notes it. What it knows is told to the others at its next step, and counts a step later
on all of them: the exchange runs beside the training step, so no step waits for it.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SignalWatch"]


class SignalWatch:
    """Watches for signals; the handlers that were there before come back at the end.

    Args:
        signals: the signals. Handlers can be set on the main thread only: elsewhere a warning says that they are not.

    Attributes:
        was_told: True once one of the signals came.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.was_told = False
        self._before: dict[signal.Signals, Any] = {}
        if not signals:
            return
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "Signals can be handled on the main thread only, and this CheckpointManager was made on another: "
                "preemption is not noticed. Pass preemption_signals=() if that is meant.",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.was_told = True

    def close(self) -> None:
        """Put back the handlers that were there."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:  # someone who came later is not ours to remove
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> SignalWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
