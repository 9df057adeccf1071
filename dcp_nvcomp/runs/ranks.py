"""What the ranks of a run tell each other, over gloo groups that only the run uses.

Training's own group may be on NCCL, and is busy: collectives of a thread beside training must not meet those of
training, nor those of another thread. So each thread of a manager has `Ranks` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_nvcomp.errors import CheckpointError, RankFailedError

__all__ = ["Ranks"]

T = TypeVar("T")

# A rank may wait here for the slowest one's upload.
_TIMEOUT = timedelta(hours=2)


class Ranks:
    """The ranks of a process group. All of them have to make one at the same time, and call the same methods.

    Args:
        group: the group; None for this process alone.

    Attributes:
        rank: this rank in the group.
        count: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.count = 0, 1
        if group is not None:
            ranks = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
            self._group = dist.new_group(
                ranks, backend="gloo", timeout=_TIMEOUT, use_local_synchronization=ranks is not None
            )
            self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """True on the rank that acts for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def share(self, value: T | None, source: int = 0) -> T:
        """Return the value of one rank; those of the others do not count."""
        if self._group is not None:
            values: list[Any] = [value]
            dist.broadcast_object_list(values, group=self._group, group_src=source)
            value = values[0]
        return value  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> T:
        """Do something on each rank, and raise on all of them if it fails on any.

        Raises:
            CheckpointError: what was raised here, or what the first of the others raised.
            RankFailedError: it was none of this package.
        """
        done, error = _tried(work)
        failures = self.gather(error)
        if error is not None:
            raise error
        first = next((failure for failure in failures if failure is not None), None)
        if first is not None:
            raise first
        return done  # type: ignore[return-value]

    def on_one(self, work: Callable[[], T], rank: int = 0) -> T:
        """Do something on one rank, and return what it returns, or raise what it raises, on all of them."""
        done, error = _tried(work) if self.rank == rank else (None, None)
        done, error = self.share((done, error), rank)
        if error is not None:
            raise error
        return done  # type: ignore[return-value]

    def begin_maximum(self, values: list[int]) -> Maximum:
        """Begin to find out the largest of the ranks' values; nobody waits."""
        return Maximum(values, self._group)

    def maximum(self, values: list[int]) -> list[int]:
        """Return the largest of the ranks' values, each by its place."""
        return self.begin_maximum(values).wait()

    def exchange(self, sent: torch.Tensor | None, to: int, received: torch.Tensor | None, source: int) -> None:
        """Send a tensor to one rank while another is received; either may be None.

        Args:
            sent: what to send, in host memory.
            to: the rank to send to.
            received: filled with what is received.
            source: the rank that sends it.
        """
        works = []
        if sent is not None:
            works.append(dist.isend(sent, group=self._group, group_dst=to))
        if received is not None:
            works.append(dist.irecv(received, group=self._group, group_src=source))
        for work in works:
            if work is not None:
                work.wait()

    def close(self) -> None:
        """Give the group up; nothing may be under way."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


class Maximum:
    """The largest of the ranks' values, once all of them have told theirs.

    Args:
        values: of this rank.
        group: over which to tell.
    """

    def __init__(self, values: list[int], group: dist.ProcessGroup | None) -> None:
        self._values = torch.tensor(values)
        self._work = None if group is None else dist.all_reduce(self._values, dist.ReduceOp.MAX, group, async_op=True)

    def wait(self) -> list[int]:
        """Return them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        values: list[int] = self._values.tolist()
        return values


def _tried(work: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    try:
        return work(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:
        failure = RankFailedError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure
