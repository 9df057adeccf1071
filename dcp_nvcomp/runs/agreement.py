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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dcp_nvcomp.calls.peers import Peers, close_connections
from dcp_nvcomp.calls.process_groups import give_back, own_groups
from dcp_nvcomp.calls.ranks import Arrival, Call, expect_same, limit_of, together
from dcp_nvcomp.errors import CheckpointError, RankFailedError, RanksDifferError, RunInUseError
from dcp_nvcomp.format.names import LARGEST_STEP
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.runs.tiers.durable import DurableTier

T = TypeVar("T")

_MOMENT = timedelta(seconds=1)


@dataclass
class _Gone:
    """What all of a manager's `Ranks` know: why no rank is waited for any more, if that is so."""

    error: RankFailedError | None = None


class Ranks:
    """The ranks of a process group. All of them have to call the same methods."""

    def __init__(self, group: dist.ProcessGroup | None, gone: _Gone | None = None) -> None:
        self._group, self._gone = group, gone or _Gone()
        self._row: Row | None = None
        self.rank, self.count = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._peers = None if group is None else Peers(group, range(self.count))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        with self._after_all_came():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def share(self, value: T | None, source: int = 0) -> T:
        if self._group is not None:
            values: list[Any] = [value]
            with self._after_all_came():
                dist.broadcast_object_list(values, group=self._group, group_src=source)
            value = values[0]
        return value  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> T:
        """Do something on each rank, and raise on all of them if it fails on any."""
        done, error = _tried(work)
        failures = self.gather(error)
        return _result(done, error or next((failure for failure in failures if failure is not None), None))

    def on_one(self, work: Callable[[], T], rank: int = 0) -> T:
        """Do something on one rank, and return what it returns, or raise what it raises, on all of them."""
        done, error = _tried(work) if self.rank == rank else (None, None)
        return _result(*self.share((done, error), rank))

    def on_first_at_length(self, work: Callable[[], T]) -> T:
        """Do on the first rank what may take longer than the others wait: they learn meanwhile that it goes on."""
        if self._group is None:
            return work()
        ended: tuple[T | None, CheckpointError | None] | None = None
        if not self.is_first:
            while ended is None:
                ended = self.share(None)
        else:
            with ThreadPoolExecutor(1, "dcp-run-first") as pool:
                doing = pool.submit(_tried, work)
                pause_seconds = limit_of(self._group).total_seconds() / 3
                while not wait([doing], pause_seconds).done:
                    self.share(None)
                ended = self.share(doing.result())
        return _result(*ended)

    def begin_row(self, call: Call, values: Sequence[int]) -> Row:
        """Begin to exchange what each rank calls, and a few numbers; no rank waits."""
        self._row = Row(call, values, self._group)
        return self._row

    def expect_same(self, calls: Sequence[Call]) -> None:
        if self._group is not None:
            expect_same(calls, self._group)

    def exchange(self, sent: torch.Tensor | None, to: int, received: torch.Tensor | None, source: int) -> None:
        """Send a tensor to one rank while another is received; either may be None."""
        assert self._peers is not None
        begun = []
        with self._after_all_came():
            if received is not None:
                begun.append(self._peers.receive(received, source, 0))
            if sent is not None:
                begun.append(self._peers.send(sent, to, 0))
            for pending in begun:
                self._peers.wait(pending)
            self._peers.settle()

    def close(self) -> None:
        """Give the group back; nothing but a row may be under way."""
        group, self._group = self._group, None
        if group is not None and self._gone.error is None and (self._row is None or self._row.is_over):
            give_back([group])

    @contextmanager
    def _after_all_came(self) -> Iterator[None]:
        """Explain what gloo raises where the other ranks are known to have come."""
        try:
            if self._gone.error is not None:
                raise self._gone.error.with_traceback(None)
            with together(self._group):
                yield
        except RankFailedError as error:
            self._gone.error = self._gone.error or error
            if self._group is not None:  # others may wait for this rank
                close_connections(self._group)
            raise


def ranks_of_run(group: dist.ProcessGroup | None, call: Call, thread_count: int) -> list[Ranks]:
    if group is None:
        return [Ranks(None)] * thread_count
    gone = _Gone()
    return [Ranks(one, gone) for one in own_groups(group, call, thread_count)]


class Row:
    """What each rank calls, and its numbers, once all of them have told theirs."""

    def __init__(self, call: Call, values: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._rows = [torch.tensor(values)]
        self._work: dist.Work | None = None
        if group is not None:
            mine, self._rows = self._rows[0], [torch.tensor(values) for _ in range(dist.get_world_size(group))]
            self._arrival = Arrival(group, call)
            with self._arrival.waiting():
                self._work = dist.all_gather(self._rows, mine, group=group, async_op=True)

    @property
    def is_over(self) -> bool:
        if self._work is None:
            return True
        try:
            return bool(self._work.wait(_MOMENT))
        except RuntimeError:  # not yet, or never
            return False

    def wait(self) -> list[list[int]]:
        if self._work is not None:
            with self._arrival.waiting():
                self._work.wait()
            self._work = None
        return [row.tolist() for row in self._rows]


def _tried(work: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    try:
        return work(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:
        failure = RankFailedError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure


def _result(done: T | None, error: CheckpointError | None) -> T:
    if error is not None:
        raise error
    return done  # type: ignore[return-value]


_NAMES: Final = ("should_save", "save", "restore", "wait")
_KNOWN: Final = 4  # numbers that each rank knows on its own
_OWN: Final = 5  # numbers of a call, at most


class SignalWatch:
    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.was_told = False
        self._last: int | None = None
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
        self.was_told, self._last = True, number

    def hand_on(self) -> None:
        """Raise the last signal again, for what handled it before: no save follows that would act on it."""
        if self._last is not None:
            signal.raise_signal(self._last)

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
        return self._lost[0]

    def raise_lost(self, made_up_for: int) -> None:
        number, error = self._lost
        if number > made_up_for and error is not None:
            raise error

    @property
    def newest(self) -> int:
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


def number_of(step: object) -> int:
    """Return a step as other ranks are told it; -1 for none, or what is no step."""
    return step if isinstance(step, int) and 0 <= step <= LARGEST_STEP else -1


class RunCall(NamedTuple):
    name: str  # of the method
    step: int = -1  # that it is called with; -1 for none
    fallback: bool = True  # option of `restore`

    @property
    def numbers(self) -> list[int]:
        return [_NAMES.index(self.name), self.step, int(self.fallback)]

    @staticmethod
    def of(numbers: Sequence[int]) -> RunCall:
        return RunCall(_NAMES[numbers[0]], numbers[1], bool(numbers[2]))

    def described(self) -> Call:
        step = "" if self.step < 0 else str(self.step)
        return Call(f"manager.{self.name}", step, {"step": step or "None", "fallback": str(self.fallback)})


class Agreement:
    def __init__(self, ranks: Ranks, signals: SignalWatch, failures: Failures, durable: DurableTier) -> None:
        self._ranks, self._signals, self._failures, self._durable = ranks, signals, failures, durable
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
        lease = self._durable.lease
        is_lost = lease is not None and lease.is_lost
        return [int(self._signals.was_told), int(is_lost), self._failures.newest, self._failures.lost]

    def _follow(self, agreed: Sequence[int]) -> None:
        told, has_lost_lease, failed, self.lost = agreed[:_KNOWN]
        self.is_preempted = self.is_preempted or bool(told)
        if has_lost_lease:
            self._durable.check_lease()
            path = without_secrets(self._durable.root)
            raise RunInUseError("Another manager has taken this run over.", path=path)
        self._failures.raise_up_to(failed)
