"""Process groups of our own: gloo groups of the same ranks as a caller's, kept for the next one who needs some.

A group that is made while others are used, and destroyed and made again, is what torch does badly for a part of the
ranks (`use_local_synchronization`): it names the group after its ranks and the number of groups that a process has. So
names come again, under which the store still has the addresses of the group before; and they differ between ranks that
are in different numbers of groups, which then wait for each other for good. So

- groups are not destroyed but kept here, by their ranks, until torch.distributed ends;
- the ranks agree on which of those that all of them keep they use;
- a new one has a name of its own, and on ranks with fewer groups than others it is made beside groups of one rank.

Whatever is done over them ends by the time limit of the caller's group, and so does making them.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_nvcomp.calls.meeting import global_ranks, together


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others before they use groups together.

    Attributes:
        idle: names of the groups that it keeps.
        registered: how many groups torch has in its process.
        name: for new ones.
    """

    idle: tuple[str, ...]
    registered: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


class _Kept:
    """The idle groups of a process, until torch.distributed is shut down."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._world = weakref.ref(world)
        self.idle: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}

    @property
    def is_usable(self) -> bool:
        return self._world() is dist.group.WORLD


_lock = threading.RLock()
_current: _Kept | None = None
# What a forked child got from its parent. Kept for good: the destructor of a process group waits for threads that the
# child does not have.
_of_parents: list[_Kept | None] = []


def offer_of(ranks: Sequence[int]) -> Offer:
    """Return what this rank offers."""
    with _lock:
        idle = tuple(str(group.group_name) for group in _kept().idle.get(tuple(ranks), ()))
        return Offer(idle, _registered())


def take(ranks: Sequence[int], count: int, offers: Sequence[Offer], limit: timedelta) -> list[dist.ProcessGroup]:
    """Return groups of some ranks, which all of them take at the same time."""
    with _lock:
        idle = {str(group.group_name): group for group in _kept().idle.get(tuple(ranks), ())}
        common = [name for name in offers[0].idle if all(name in one.idle for one in offers)][:count]
        # one that another rank has given up, after an error, is of no use any more
        _kept().idle[tuple(ranks)] = [
            group for name, group in idle.items() if name not in common and all(name in one.idle for one in offers)
        ]
        found = [idle[name] for name in common]
        for group in found:
            group.set_timeout(limit)
        with together(dist.group.WORLD):
            return [*found, *_made(ranks, count - len(found), offers, limit)]


def give_back(groups: Sequence[dist.ProcessGroup]) -> None:
    """Keep groups for the next one who needs some; nothing is under way over them, and nothing went wrong."""
    with _lock:
        for group in groups:
            if is_registered(group):
                _kept().idle.setdefault(global_ranks(group), []).append(group)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return False once a group was destroyed."""
    try:
        return dist.is_initialized() and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _kept() -> _Kept:
    global _current
    if _current is None or not _current.is_usable:
        _current = _Kept()
    return _current


def _made(ranks: Sequence[int], count: int, offers: Sequence[Offer], limit: timedelta) -> list[dist.ProcessGroup]:
    if not count:
        return []
    if len(ranks) == dist.get_world_size():  # torch numbers groups that all ranks make
        return [_group(None, limit) for _ in range(count)]
    most, own = max(one.registered for one in offers), dist.get_rank()
    beside = [_group([_NamedRank(own, uuid.uuid4().hex)], limit) for _ in range(most - _registered())]
    try:
        first, *others = sorted(ranks)
        return [_group([_NamedRank(first, f"{offers[0].name}-{number}"), *others], limit) for number in range(count)]
    finally:
        for group in beside:
            dist.destroy_process_group(group)


def _group(ranks: list[int] | None, limit: timedelta) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(
        ranks, backend="gloo", timeout=limit, use_local_synchronization=ranks is not None
    )
    return made


class _NamedRank(int):
    """A rank that is written as another text: that of a group's ranks makes the group's name."""

    def __new__(cls, rank: int, name: str) -> _NamedRank:
        made = super().__new__(cls, rank)
        made._name = name
        return made

    _name: str

    def __str__(self) -> str:
        return self._name

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _registered() -> int:
    return len(distributed_c10d._world.pg_names)


def _begin_again() -> None:
    """In a forked child."""
    global _current, _lock
    _of_parents.append(_current)
    _current, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_begin_again)
