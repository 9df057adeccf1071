"""What all ranks of a run decide together, at the same step: that the job was told to end, that a save failed.

What a rank notices goes to the others with the next call that all of them make, and counts on all ranks from the same
call on. Each call of a manager begins so, with as many numbers, of which the first say what is called. The exchange of
`should_save` runs beside the training step, so no step waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

from dcp_nvcomp.calls.ranks import Call
from dcp_nvcomp.errors import RankFailedError, RanksDifferError, RunInUseError
from dcp_nvcomp.runs.lease import Lease
from dcp_nvcomp.runs.ranks import Ranks, Row

_NAMES: Final = ("should_save", "save", "restore", "wait")
_KNOWN: Final = 4  # numbers that each rank knows on its own
_OWN: Final = 4  # numbers of a call, at most


class SignalWatch:
    """Watches for signals; the handlers that were there before come back at the end."""

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
        for number in self._before:
            if signal.getsignal(number) == self._note:  # someone who came later is not ours to remove
                self._put_back(number)
        self._before = {}


class Failures:
    """What failed and was not raised yet.

    Ranks notice a failure at different times, and must raise it at the same call. So each tells the others the newest
    step that failed on it, and a step that was raised once is not raised again by a rank that notices later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[int, BaseException] = {}
        self._raised = 0
        self._lost: tuple[int, BaseException | None] = 0, None

    def note(self, number: int, error: BaseException) -> None:
        with self._lock:
            if number > self._raised:
                self._errors[number] = error

    def note_lost(self, number: int, error: BaseException) -> None:
        """Remember a save that the fast tier lost on its way to the durable one: the next save makes up for it."""
        with self._lock:
            self._lost = max(self._lost[0], number), error

    @property
    def lost(self) -> int:
        """The latest save that the fast tier lost; 0 if there is none."""
        return self._lost[0]

    def raise_lost(self, made_up_for: int) -> None:
        """Raise why a save was lost, if no later one made up for it."""
        number, error = self._lost
        if number > made_up_for and error is not None:
            raise error

    @property
    def newest(self) -> int:
        """The latest save that failed and was not raised; 0 if none did."""
        with self._lock:
            return max(self._errors, default=0)

    def raise_up_to(self, number: int) -> None:
        """Raise what failed, on each rank, once the ranks agreed that a save did."""
        with self._lock:
            if number <= self._raised:
                return
            self._raised = number
            own = [self._errors.pop(one) for one in sorted(self._errors) if one <= number]
        if not own:
            raise RankFailedError("A save in the background failed on another rank, which says why.")
        raise own[-1]


class RunCall(NamedTuple):
    """What a rank calls of its manager."""

    name: str  # of the method
    step: int = -1  # that it is called with; -1 for none
    fallback: bool = True  # option of `restore`

    @property
    def numbers(self) -> list[int]:
        """As other ranks get it."""
        return [_NAMES.index(self.name), self.step, int(self.fallback)]

    @staticmethod
    def of(numbers: Sequence[int]) -> RunCall:
        """Return what a rank called."""
        return RunCall(_NAMES[numbers[0]], numbers[1], bool(numbers[2]))

    def described(self) -> Call:
        """Return it as messages show it."""
        step = "" if self.step < 0 else str(self.step)
        return Call(f"manager.{self.name}", step, {"step": step or "None", "fallback": str(self.fallback)})


class Agreement:
    """What the ranks agree on."""

    def __init__(
        self, ranks: Ranks, signals: SignalWatch, failures: Failures, lease: Callable[[], Lease | None], path: str
    ) -> None:
        self._ranks, self._signals, self._failures, self._lease, self._path = ranks, signals, failures, lease, path
        self._pending: Row | None = None
        self.is_preempted = False
        self.lost = 0  # the latest save that the fast tier of any rank lost on its way to the durable one

    def beside_training(self, call: RunCall) -> None:
        """Take in what the ranks exchanged since the last call, and begin to exchange what is known now."""
        pending, self._pending = self._pending, self._begin(call)
        if pending is not None:
            self._follow(self._end(pending))

    def now(self, call: RunCall, *own: int) -> list[int]:
        largest = self._end(self._begin(call, *own))
        self._follow(largest)
        return largest[_KNOWN : _KNOWN + len(own)]

    def come(self, call: RunCall, *own: int) -> list[int]:
        """Wait until all ranks make this call; what else they know stays for the next one."""
        return self._end(self._begin(call, *own))[_KNOWN : _KNOWN + len(own)]

    def after(self, call: RunCall) -> None:
        """Agree at the end of a call; that the job shall end counts from the next call on, which has a save to make."""
        try:
            _, *known = self._end(self._begin(call))
        except RanksDifferError as error:
            if not error.in_vain:
                raise
            if self._failures.newest:  # this rank has waited for the same one in the background
                self._failures.raise_up_to(self._failures.newest)
            raise RankFailedError(
                f"Another rank is gone, or was waited for too long, in {call.described()}."
            ) from error
        self._follow([0, *known])

    def _begin(self, call: RunCall, *own: int) -> Row:
        values = [*call.numbers, *self._known(), *own, *[0] * (_OWN - len(own))]
        return self._ranks.begin_row(call.described(), values)

    def _end(self, row: Row) -> list[int]:
        """Return the largest of the ranks' numbers, but for what says which call it is."""
        rows = row.wait()
        width = len(RunCall("save").numbers)
        if any(other[:width] != rows[0][:width] for other in rows):
            self._ranks.expect_same([RunCall.of(other).described() for other in rows])
        return [max(values) for values in list(zip(*rows, strict=True))[width:]]

    def _known(self) -> list[int]:
        """Return what this rank knows and the others may not."""
        lease = self._lease()
        is_lost = lease is not None and lease.is_lost
        return [int(self._signals.was_told), int(is_lost), self._failures.newest, self._failures.lost]

    def _follow(self, agreed: Sequence[int]) -> None:
        told, has_lost_lease, failed, self.lost = agreed[:_KNOWN]
        self.is_preempted = self.is_preempted or bool(told)
        if has_lost_lease:
            lease = self._lease()
            if lease is not None:
                lease.check()
            raise RunInUseError("Another manager has taken this run over.", path=self._path)
        self._failures.raise_up_to(failed)
