"""The ranks of a call: which they are, and whether all of them make the same call.

Collectives of two threads must not meet, nor those of a thread and of training, so each thread that has any needs a
group that only it uses (process_groups.py). A rank that waits in vain can't ask the others why, so each writes what it
calls into the store through which the process groups were made, and reads there what the others called last.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_nvcomp.errors import CheckpointError, ConfigurationError, RankFailedError, RanksDifferError
from dcp_nvcomp.redaction import without_secrets

T = TypeVar("T")

# DCP says in each process that it "assumes the intent" to be alone, also where that was asked for.
_ALONE: Final = "torch.distributed is disabled, unavailable or uninitialized"
_USUAL_LIMIT: Final = timedelta(minutes=30)  # torch's own
_REMEMBERED: Final = 4  # calls of a rank: its latest may be one that it made after it waited in vain, too
_NAMED: Final = 8
_PAUSE_SECONDS: Final = 0.05

_GONE: Final = (
    "The process group is gone: destroy_process_group was called since it was made. Make it anew, and what uses it, "
    "such as a CheckpointManager."
)

_ELSEWHERE: Final = "is_of_another_rank"

_Called = tuple[str, int, str]  # the group's name, the number of the call in it, the call


def group_of(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> dist.ProcessGroup | None:
    """Return the ranks that save or load together, None without torch.distributed; warn if a launcher started more."""
    if not no_dist and dist.is_available() and dist.is_initialized():
        _check_group(process_group)
        # what new_group returns on other ranks is a number
        if isinstance(process_group, int) or (process_group is not None and dist.get_rank(process_group) < 0):
            raise ConfigurationError(
                f"Rank {dist.get_rank()} is not in the process group that it was given: only ranks of the group make "
                "this call."
            )
        return process_group or dist.group.WORLD
    if process_group is not None and not no_dist:
        raise ConfigurationError(_GONE)
    expect_no_group()
    processes = os.environ.get("WORLD_SIZE", "1")
    if not no_dist and processes not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE={processes}, but torch.distributed is not initialized: each process saves and loads alone, "
            "and of several that save to one path the last one wins. Call torch.distributed.init_process_group "
            "first, or pass no_dist=True if that is meant.",
            RuntimeWarning,
            stacklevel=3,
        )
    return None


def _check_group(process_group: dist.ProcessGroup | int | None) -> None:
    """Refuse a group of a world that is gone: `destroy_process_group` was called, and a new world was made."""
    if process_group is not None and not isinstance(process_group, int):
        if not isinstance(process_group, dist.ProcessGroup):
            kind = type(process_group).__name__
            raise ConfigurationError(f"process_group= takes a ProcessGroup, not a {kind}; a mesh has get_group().")
        try:
            dist.get_process_group_ranks(process_group)
        except (ValueError, KeyError):
            raise ConfigurationError(_GONE) from None


def expect_no_group() -> None:
    """Silence DCP's warning that this process is alone, once: changed filters make Python forget what it has shown."""
    for action, text, category, *_ in warnings.filters:
        if issubclass(UserWarning, category) and (text is None or re.match(text, _ALONE)):
            if action == "ignore":
                return
            break
    warnings.filterwarnings("ignore", message=_ALONE)


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group in the world; those that torch returns may be `_NamedRank`s."""
    return tuple(map(int, dist.get_process_group_ranks(group)))


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the collectives of a group wait: what it was made with."""
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):  # some backends have no such option
            limit: timedelta = group._get_backend(device).options._timeout
            return limit
    return _USUAL_LIMIT


def error_of_ranks(error: CheckpointException, group: dist.ProcessGroup | None) -> BaseException:
    """Return what to raise instead of DCP's exception, which is no `Exception`, and the same on all ranks."""
    failures = {number: failure for number, (failure, _) in error.failures.items()}
    failures = {number: one for number, one in failures.items() if not getattr(one, _ELSEWHERE, False)} or failures
    rank = 0 if group is None else dist.get_rank(group)
    ours = failures.get(rank, next(iter(failures.values()), None))
    if isinstance(ours, CheckpointError) or (ours is not None and not isinstance(ours, Exception)):
        return ours.with_traceback(None)  # of twenty frames that are DCP's
    words = {number: f"{type(one).__name__}: {one}" for number, one in failures.items()}
    is_alone = len(words) == 1 and (group is None or dist.get_world_size(group) == 1)
    failed = RankFailedError.of(words, is_alone=is_alone)
    stack = error.failures[min(failures)][1] if failures else None
    if stack:
        failed.message += f" (raised in {stack[-1].filename}, line {stack[-1].lineno})"
    failed.__cause__ = ours  # with its traceback, if it is this rank's
    return failed


def failed_elsewhere(name: str) -> RankFailedError:
    """Return what a rank may raise because another one does: that one's error is raised then, on all of them."""
    failure = RankFailedError(f"The {name} failed on another rank, which says why.")
    setattr(failure, _ELSEWHERE, True)
    return failure


@contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Explain what the backend raises in collectives of ranks that are known to have come."""
    try:
        yield
    except CheckpointError:
        raise
    except RuntimeError as error:  # of gloo, NCCL, or torch's store
        if group is None:
            raise
        failure = RankFailedError(f"Another rank is gone, or was waited for too long: {error}")
        failure.in_vain = True
        raise failure from error


@dataclass(frozen=True)
class Call:
    """What a rank calls: a function, what it is about as messages show it, and what all ranks must give alike."""

    name: str
    subject: str = field(default="", compare=False)
    terms: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(name: str, place: str, **terms: Any) -> Call:
        subject = repr(without_secrets(place))
        return Call(name, subject, {"path": subject, **{term: repr(value) for term, value in terms.items()}})

    def __str__(self) -> str:
        return f"{self.name}({self.subject})"


def meet(group: dist.ProcessGroup | None, call: Call, mine: T) -> list[T]:
    """Wait until all ranks make the same call, and return what each of them brings."""
    if group is None:
        return [mine]
    everyones: list[Any] = [None] * dist.get_world_size(group)
    arrival = Arrival(group, call)
    with arrival.waiting():
        arrival.wait_in_store()
        dist.all_gather_object(everyones, (call, mine), group=group)
    expect_same([called for called, _ in everyones], group)
    return [told for _, told in everyones]


def expect_same(calls: Sequence[Call], group: dist.ProcessGroup) -> None:
    if all(call == calls[0] for call in calls):
        return
    if len({call.name for call in calls}) > 1:
        raise RanksDifferError(
            f"The ranks call different things: {_by_rank(list(map(str, calls)), group)}. All ranks of the process "
            "group have to make the same calls in the same order."
        )
    names = dict.fromkeys(name for call in calls for name in call.terms)
    differing = [(name, [call.terms.get(name, "the usual") for call in calls]) for name in names]
    said = "; ".join(f"{name}: {_by_rank(values, group)}" for name, values in differing if len(set(values)) > 1)
    raise RanksDifferError(f"The ranks call {calls[0].name} with different values of {said}. Give all ranks the same.")


class PerWorld(Generic[T]):
    """A value that is made anew after `destroy_process_group`, as names of groups come again, and in a forked child."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._held: tuple[weakref.ref[dist.ProcessGroup], T] | None = None
        # What a forked child got from its parent. Kept for good: the destructor of a process group waits for threads
        # that the child does not have.
        self._of_parents: list[object] = []
        os.register_at_fork(after_in_child=self._begin_again)

    def get(self) -> T:
        world = dist.group.WORLD
        if world is None:
            raise ConfigurationError("torch.distributed was shut down (destroy_process_group) before this call.")
        with self._lock:
            if self._held is None or self._held[0]() is not world:
                self._held = weakref.ref(world), self._make()
            return self._held[1]

    def _begin_again(self) -> None:
        self._of_parents.append(self._held)
        self._held, self._lock = None, threading.Lock()


class _CalledHere:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # over each group, by its name
        self.latest: deque[_Called] = deque(maxlen=_REMEMBERED)


_called = PerWorld(_CalledHere)


class Arrival:
    """A rank that has come to a call, where others may be missing."""

    def __init__(self, group: dist.ProcessGroup, call: Call) -> None:
        self._group, self._call = group, call
        self._began_seconds = time.monotonic()
        world = _called.get()
        world.counts[group.group_name] += 1
        self._number = world.counts[group.group_name]
        world.latest.append((group.group_name, self._number, str(call)))
        with suppress(Exception):  # a store that is gone is no reason to fail
            _store().set(_key(dist.get_rank()), json.dumps(list(world.latest)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Explain what the backend raises if not all ranks come."""
        try:
            yield
        except RuntimeError as error:  # of gloo, or NCCL
            explained = RanksDifferError(self._explanation(error))
            explained.in_vain = True
            raise explained from error

    def wait_in_store(self) -> None:
        """Wait for all ranks where the backend is not one for CPUs: NCCL ends the process if it waits in vain."""
        if any(device.type == "cpu" for device in self._group._device_types):
            return
        key = f"dcp_nvcomp/come/{self._group.group_name}/{self._number}"
        store, pause_seconds = _store(), 1e-3
        end_seconds = time.monotonic() + limit_of(self._group).total_seconds()
        if store.add(key, 1) == self._group.size() and not store.check([f"{key}/gone"]):
            store.set(f"{key}/all", "")
        while not store.check([f"{key}/all"]):
            if store.check([f"{key}/gone"]):
                raise RuntimeError("another rank has given up waiting")
            if time.monotonic() > end_seconds:
                store.set(f"{key}/gone", "")  # a rank that comes later must not go on alone
                raise RuntimeError("timed out")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS)

    def _explanation(self, error: RuntimeError) -> str:
        waited = f"within {max(round(time.monotonic() - self._began_seconds), 1)} s"
        if any(words in str(error).lower() for words in ("closed by peer", "connection reset", "broken pipe")):
            waited += ", when the connection to a rank was closed, as it is when a process ends or gives up"
        name, own = self._group.group_name, dist.get_rank()
        others = {rank: _latest_calls_of(rank) for rank in global_ranks(self._group) if rank != own}
        absent = {
            rank: calls
            for rank, calls in others.items()
            if not any(group == name and number >= self._number for group, number, _ in calls)
        }
        if not absent:
            return (
                f"The ranks did not come together at {self._call} {waited}: one of them may have failed, or have been "
                f"waited for longer than the process group's time limit ({error})."
            )
        last = [
            f"The last that rank {rank} called was {calls[-1][-1]}."
            if calls
            else f"Rank {rank} has called nothing yet."
            for rank, calls in list(absent.items())[:_NAMED]
        ]
        return (
            f"{_named(list(absent)).capitalize()} did not call {self._call.name} {waited}: all ranks of the process "
            f"group have to, and this one called {self._call}. {' '.join(last)}"
        )


def _latest_calls_of(rank: int) -> list[_Called]:
    """Return what a rank called, the latest last; nothing if it has written nothing. Never waits."""
    with suppress(Exception):
        store = _store()
        if store.check([_key(rank)]):  # `get` alone would wait for the key
            return [(group, number, call) for group, number, call in json.loads(store.get(_key(rank)))]
    return []


def _store() -> Any:
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def _key(rank: int) -> str:
    return f"dcp_nvcomp/called/{rank}"


def _by_rank(values: Sequence[str], group: dist.ProcessGroup) -> str:
    who: dict[str, list[int]] = {}
    for rank, value in zip(global_ranks(group), values, strict=True):
        who.setdefault(value, []).append(rank)
    some = [f"{value} ({_named(have)})" for value, have in list(who.items())[:_NAMED]]
    return ", ".join(some) + (", ..." if len(who) > _NAMED else "")


def _named(ranks: Sequence[int]) -> str:
    some = f"{', '.join(map(str, ranks[:_NAMED]))}{', ...' if len(ranks) > _NAMED else ''}"
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
