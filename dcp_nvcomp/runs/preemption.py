"""Preemption: a signal to any rank becomes a decision of all ranks at the same step.

A rank that is told to go only notes it. What it knows is told to the others at its next step, and counts a step later
on all of them: the exchange runs beside the training step, so no step waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any


class SignalWatch:
    """Watches for signals; the handlers that were there before come back at the end.

    Attributes:
        was_told: True once one of the signals came.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.was_told = False
        self._pid = os.getpid()
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
        if os.getpid() != self._pid:  # a child that was forked: it has no save to make, and must end as others do
            self._put_back(number)
            os.kill(os.getpid(), number)
            return
        self.was_told = True

    def _put_back(self, number: int) -> None:
        handler = self._before.get(signal.Signals(number))
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def close(self) -> None:
        """Put back the handlers that were there."""
        for number in self._before:
            if signal.getsignal(number) == self._note:  # someone who came later is not ours to remove
                self._put_back(number)
        self._before = {}

    def __enter__(self) -> SignalWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
