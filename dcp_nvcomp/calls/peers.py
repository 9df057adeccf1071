"""Long messages, each from one rank to one other, over a process group.

gloo leaves a rank waiting, for as long as its group may wait, if a connection ends in the middle of a message: it ends
the wait only for messages that have not begun. So an empty message, which has no middle, follows each message, and
another one answers it; a rank waits for these two, and for the message itself only when it is there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from dcp_nvcomp.calls.ranks import together

_ROUND_TAGS: Final = 1 << 28  # above those of other messages
_MOST_NETWORKS: Final = 8
# Between the tags of a message and of its answer. With several network interfaces gloo sends by the one that is the
# tag's remainder: the same for both, so that both end if a connection does.
_APART: Final = 840 * 639_132
_NEVER_SENT: Final = (1 << 31) - _MOST_NETWORKS
_MOMENT: Final = timedelta(milliseconds=1)


@dataclass(frozen=True)
class Pending:
    """A message under way, to another rank or from it."""

    message: dist.Work
    follower: dist.Work  # an empty message after it
    answer: dist.Work | None  # an empty message back, if this rank sends
    peer: int
    tag: int  # of the answer


def can_exchange(group: dist.ProcessGroup) -> bool:
    """Return True if ranks of a group can send each other bytes in host memory, on several threads at once."""
    if dist.get_world_size(group) == 1:
        return False
    with suppress(RuntimeError, AttributeError):  # NCCL alone has no such backend
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    return False


class Peers:
    """Ranks that send each other messages; their positions count, not their ranks.

    Args:
        group: over which they do.
        members: which ranks of it, this one too; the same on all of them.
        number: 0, or 1: distinguishes these messages from others of the same ranks.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], number: int = 0) -> None:
        self._group, self._members, self._number = group, tuple(members), number
        self._rounds = 0
        self._answers: list[dist.Work] = []
        self._lock, self._is_abandoned = threading.Lock(), False
        self.own = self._members.index(dist.get_rank(group))
        self.count = len(self._members)
        self.others = [position for position in range(self.count) if position != self.own]

    def send(self, data: torch.Tensor, to: int, tag: int) -> Pending:
        """Begin to send a message."""
        tag, of_answer = self._tags(tag)
        message, follower = self._send(data, to, tag), self._send(_empty(), to, tag)
        return Pending(message, follower, self._receive(_empty(), to, of_answer), to, of_answer)

    def receive(self, into: torch.Tensor, source: int, tag: int) -> Pending:
        """Begin to receive a message."""
        tag, of_answer = self._tags(tag)
        message, follower = self._receive(into, source, tag), self._receive(_empty(), source, tag)
        return Pending(message, follower, None, source, of_answer)

    def wait(self, pending: Pending) -> None:
        """Wait until a message has arrived, here or on the other rank; raise RankFailedError where it can't.

        A rank that waited for what it sends before what it receives would not answer the other meanwhile.
        """
        with together(self._group):
            (pending.answer or pending.follower).wait()
            pending.message.wait()
            if pending.answer is not None:
                pending.follower.wait()
        if pending.answer is None:
            self._answers.append(self._send(_empty(), pending.peer, pending.tag))

    def settle(self) -> None:
        """Wait until the other ranks know that their messages have arrived."""
        with together(self._group):
            while self._answers:
                self._answers.pop().wait()

    def all_tell(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return what each of them tells, by position; all call it in the same order."""
        tag, self._rounds = _ROUND_TAGS + self._rounds, self._rounds + 1
        told = [mine if position == self.own else torch.empty_like(mine) for position in range(self.count)]
        begun = [self.receive(told[position], position, tag) for position in self.others]
        begun += [self.send(mine, position, tag) for position in self.others]
        for pending in begun:
            self.wait(pending)
        return told

    def abandon(self) -> None:
        """Close the connections, so that no rank waits for this one."""
        with self._lock:
            if not self._is_abandoned:
                self._is_abandoned = True
                close_connections(self._group)

    def _tags(self, tag: int) -> tuple[int, int]:
        first = tag + 2 * self._number * _APART
        return first, first + _APART

    def _send(self, data: torch.Tensor, to: int, tag: int) -> dist.Work:
        with together(self._group):
            work = dist.isend(data, group=self._group, group_dst=self._members[to], tag=tag)
        assert work is not None
        return work

    def _receive(self, into: torch.Tensor, source: int, tag: int) -> dist.Work:
        with together(self._group):
            work = dist.irecv(into, group=self._group, group_src=self._members[source], tag=tag)
        assert work is not None
        return work


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def close_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of a group, which is of no use then: gloo closes all if a rank waits for one in vain."""
    with suppress(RuntimeError, ValueError):  # torch.distributed may have ended meanwhile
        own = dist.get_rank(group)
        others = [other for other in range(dist.get_world_size(group)) if other != own]
        for other, network in itertools.product(others, range(_networks(group))):
            with suppress(RuntimeError):  # one that is closed already fails at once, and closes no other
                work = dist.irecv(_empty(), group=group, group_src=other, tag=_NEVER_SENT + network)
                assert work is not None
                work.wait(_MOMENT)


def _networks(group: dist.ProcessGroup) -> int:
    with suppress(AttributeError):
        return len(group._get_backend(torch.device("cpu")).options._devices)  # type: ignore[attr-defined]
    return _MOST_NETWORKS
