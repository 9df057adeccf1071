"""Makes and caches process groups of our own, over gloo, of the ranks of a caller's group.

torch makes groups of a part of the ranks (`use_local_synchronization`) under a name that comes from the ranks and from
how many groups a process has, or, from 2.14 on, has made. So names come again after a group was destroyed, when the
store still has the addresses of the one before; and they differ between ranks that are or were in different numbers of
groups, which then wait for each other for good. So groups are not destroyed but cached by their ranks until
torch.distributed ends; the ranks use those that all of them have in their caches; and a new one has a name of its own:

    before 2.14     from the ranks, one of which is written as another text; made beside groups of one rank on ranks
                    that are in fewer groups than others
    from 2.14 on    from torch's count of groups, which is another number while one of ours is made. Afterwards it is
                    what it was: groups that all ranks make later are named by it, also by ranks that made none here
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoResultYet
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_nvcomp.calls.ranks import Call, PerWorld, global_ranks, limit_of, meet, together

_BY_COUNT: Final = "group_count" in distributed_c10d._hash_ranks_to_str.__code__.co_names  # as of torch 2.14
_MOST_BESIDE: Final = 1 << 32  # groups that others make while one of ours is made; their numbers are far apart
_MOST_LIMITS: Final = 2  # torch waits for several things one after the other when it makes a group


class _Groups:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.cache: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}

    def cached_of(self, ranks: Sequence[int]) -> dict[str, dist.ProcessGroup]:
        return {str(group.group_name): group for group in self.cache.get(tuple(ranks), ())}


_groups = PerWorld(_Groups)


@dataclass(frozen=True)
class Offer:
    """What a rank brings to making groups: names of its cached ones, how many torch has, and a name for new ones."""

    cached: tuple[str, ...]
    registered: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


def own_groups(group: dist.ProcessGroup, call: Call, count: int) -> list[dist.ProcessGroup]:
    ranks = global_ranks(group)
    return take(ranks, count, meet(group, call, offer_of(ranks)), limit_of(group))


def offer_of(ranks: Sequence[int]) -> Offer:
    groups = _groups.get()
    with groups.lock:
        return Offer(tuple(groups.cached_of(ranks)), _registered())


def take(ranks: Sequence[int], count: int, offers: Sequence[Offer], limit: timedelta) -> list[dist.ProcessGroup]:
    """Return groups of some ranks, which all of them take at the same time."""
    groups = _groups.get()
    with groups.lock:
        cached = groups.cached_of(ranks)
        on_all = [name for name in offers[0].cached if all(name in one.cached for one in offers)]
        used = on_all[:count]
        # one that another rank has given up, after an error, is of no use any more
        groups.cache[tuple(ranks)] = [cached[name] for name in on_all[count:]]
        for name in used:
            cached[name].set_timeout(limit)
        with together(dist.group.WORLD):
            return [*(cached[name] for name in used), *_made(ranks, count - len(used), offers, limit)]


def give_back(groups: Sequence[dist.ProcessGroup]) -> None:
    """Cache groups for the next call; nothing is under way over them, and nothing went wrong."""
    for group in groups:
        if is_registered(group):
            own = _groups.get()
            with own.lock:
                own.cache.setdefault(global_ranks(group), []).append(group)


def is_registered(group: dist.ProcessGroup) -> bool:
    try:
        return dist.is_initialized() and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _made(ranks: Sequence[int], count: int, offers: Sequence[Offer], limit: timedelta) -> list[dist.ProcessGroup]:
    if not count:
        return []
    names = [f"{offers[0].name}{number:02x}" for number in range(count)]
    if _BY_COUNT:
        return [_new_group(sorted(ranks), limit, int(name, 16)) for name in names]
    if len(ranks) == dist.get_world_size():  # torch numbers groups that all ranks make
        return [_new_group(None, limit) for _ in range(count)]
    most, own = max(one.registered for one in offers), dist.get_rank()
    beside = [_new_group([_NamedRank(own, uuid.uuid4().hex)], limit) for _ in range(most - _registered())]
    try:
        first, *others = sorted(ranks)
        return [_new_group([_NamedRank(first, name), *others], limit) for name in names]
    finally:
        for group in beside:
            dist.destroy_process_group(group)


class _Making:
    """A group that torch makes on a thread of its own: where a rank dies meanwhile, torch may wait without a limit."""

    def __init__(self, ranks: list[int] | None, limit: timedelta, number: int | None) -> None:
        self._ranks, self._limit, self._number = ranks, limit, number
        self._made: Future[dist.ProcessGroup] = Future()
        self._is_given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._make, name="dcp-new-group", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        self._count_before = distributed_c10d._world.group_count
        try:
            if self._number is not None:
                distributed_c10d._world.group_count = self._number
            group = dist.new_group(
                self._ranks, backend="gloo", timeout=self._limit, use_local_synchronization=self._ranks is not None
            )
        except BaseException as error:
            self._count_as_before()
            self._made.set_exception(error)
            return
        self._count_as_before()
        with self._lock:
            if not self._is_given_up:
                self._made.set_result(group)
                return
        with suppress(ValueError, AssertionError):  # torch.distributed may have ended meanwhile
            dist.destroy_process_group(group)  # it came too late, and would change the names of later ones

    def _count_as_before(self) -> None:
        """Let torch count on from where it was, unless it does so already or torch.distributed has ended meanwhile."""
        if self._number is not None:
            beside = distributed_c10d._world.group_count - self._number - 1
            if -1 <= beside < _MOST_BESIDE:
                distributed_c10d._world.group_count = self._count_before + max(beside, 0)

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def group(self) -> dist.ProcessGroup:
        """Wait, and return the group; `RuntimeError` if torch does not return from making it."""
        seconds = _MOST_LIMITS * self._limit.total_seconds()
        with suppress(NoResultYet):
            return self._made.result(seconds)
        with self._lock:
            self._is_given_up = not self._made.done()
        if self._is_given_up:
            self._count_as_before()
            _stuck.get().append(self)
            raise RuntimeError(f"torch made no process group in {seconds:.0f} s.")
        return self._made.result()


_stuck: PerWorld[list[_Making]] = PerWorld(list)


def _new_group(ranks: list[int] | None, limit: timedelta, number: int | None = None) -> dist.ProcessGroup:
    # torch numbers groups: two that are made at a time could get each other's names
    if any(making.is_under_way for making in _stuck.get()):
        raise RuntimeError("torch still waits for a process group that another rank did not make.")
    return _Making(ranks, limit, number).group()


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
