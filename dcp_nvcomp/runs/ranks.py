"""What the ranks of a run exchange, over gloo groups that only the run uses: one for each thread (calls/ranks.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_nvcomp.calls.ranks import Arrival, Call, expect_same, give_back, limit_of, own_groups, together
from dcp_nvcomp.errors import CheckpointError, RankFailedError

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

    @property
    def is_first(self) -> bool:
        """True on the rank that acts for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        with self._after_all_came():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def share(self, value: T | None, source: int = 0) -> T:
        """Return the value of one rank; those of the others do not count."""
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
        works = []
        with self._after_all_came():
            if sent is not None:
                works.append(dist.isend(sent, group=self._group, group_dst=to))
            if received is not None:
                works.append(dist.irecv(received, group=self._group, group_src=source))
            for work in works:
                if work is not None:
                    work.wait()

    def close(self) -> None:
        """Give the group back; nothing but a row may be under way."""
        group, self._group = self._group, None
        if group is not None and self._gone.error is None and (self._row is None or self._row.is_over):
            give_back([group])

    @contextmanager
    def _after_all_came(self) -> Iterator[None]:
        """Explain what gloo raises where the other ranks are known to have come."""
        if self._gone.error is not None:
            raise self._gone.error.with_traceback(None)
        try:
            with together(self._group):
                yield
        except RankFailedError as error:
            self._gone.error = error
            raise


def ranks_of_run(group: dist.ProcessGroup | None, call: Call, thread_count: int) -> list[Ranks]:
    """Return the ranks of a run, for each thread of a manager that has collectives."""
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
        """True once all ranks have told theirs; waits a moment for those that are about to."""
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
