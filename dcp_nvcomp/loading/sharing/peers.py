"""Messages between the ranks that share reads, each from one to one other, over the group that they load with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from dcp_nvcomp.calls.ranks import together

_ROUND_TAGS: Final = 1 << 29  # above those of reads
_NEVER_SENT: Final = (1 << 31) - 1
_MOMENT: Final = timedelta(milliseconds=1)


def can_exchange(group: dist.ProcessGroup) -> bool:
    """Return True if ranks of a group can send each other bytes in host memory, on several threads at once."""
    if dist.get_world_size(group) == 1:
        return False
    with suppress(RuntimeError, AttributeError):  # NCCL alone has no such backend
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    return False


class Peers:
    """The ranks that share some reads; their positions count, not their ranks.

    Args:
        group: the ranks that load.
        members: those of them that share the reads, this one too; the same on all of them.
        number: distinguishes what these ranks share from other reads of the same load.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], number: int) -> None:
        self._group, self._members, self._number = group, tuple(members), number
        self._rounds = 0
        self.own = self._members.index(dist.get_rank(group))
        self.count = len(self._members)
        self.others = [position for position in range(self.count) if position != self.own]

    def send(self, data: torch.Tensor, to: int, tag: int) -> dist.Work:
        with together(self._group):
            work = dist.isend(data, group=self._group, group_dst=self._members[to], tag=self._tag(tag))
        assert work is not None
        return work

    def receive(self, into: torch.Tensor, source: int, tag: int) -> dist.Work:
        with together(self._group):
            work = dist.irecv(into, group=self._group, group_src=self._members[source], tag=self._tag(tag))
        assert work is not None
        return work

    def all_tell(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return what each of them tells, by position; all call it in the same order."""
        tag, self._rounds = _ROUND_TAGS + 2 * self._rounds, self._rounds + 1
        told = [mine if position == self.own else torch.empty_like(mine) for position in range(self.count)]
        works = [self.receive(told[position], position, tag) for position in self.others]
        works += [self.send(mine, position, tag) for position in self.others]
        for work in works:
            self.wait(work)
        return told

    def wait(self, work: dist.Work) -> None:
        """Wait until a message is sent or has arrived; raise RankFailedError where it can't."""
        with together(self._group):
            work.wait()

    def abandon(self) -> None:
        """Close the connections, so that no rank waits for this one."""
        close_connections(self._group)

    def _tag(self, tag: int) -> int:
        return 2 * tag + self._number


def close_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of a group, which is of no use then: gloo closes all if a rank waits for one in vain."""
    own = dist.get_rank(group)
    for other in range(dist.get_world_size(group)):  # one that is closed already fails at once, and closes no other
        if other == own:
            continue
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=other, tag=_NEVER_SENT)
            assert work is not None
            work.wait(_MOMENT)
