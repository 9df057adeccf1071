"""How the ranks of a call come together: each says what it calls, and all see whether that is the same everywhere.

A rank that waits in vain can't ask the others why. So each leaves word of what it calls in the store through which the
process groups were made, which takes microseconds, and whoever waited in vain reads there what the others called last.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from dcp_nvcomp.errors import CheckpointError, RankFailedError, RanksDifferError
from dcp_nvcomp.redaction import without_secrets

T = TypeVar("T")

_USUAL_LIMIT: Final = timedelta(minutes=30)  # torch's own
_REMEMBERED: Final = 4  # calls of a rank: its latest may be one that it made after it waited in vain, too
_NAMED: Final = 8
_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Call:
    """What a rank calls.

    Attributes:
        name: of the function.
        subject: what it is called with, as far as messages show it.
        terms: what has to be the same on all ranks, by name.
    """

    name: str
    subject: str = field(default="", compare=False)
    terms: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(name: str, place: str, **terms: Any) -> Call:
        """Return a call that is about a path or URL, the same on all ranks, which is shown without its secrets."""
        subject = repr(without_secrets(place))
        return Call(name, subject, {"path": subject, **{term: repr(value) for term, value in terms.items()}})

    def __str__(self) -> str:
        return f"{self.name}({self.subject})"


def meet(group: dist.ProcessGroup | None, call: Call, mine: T) -> list[T]:
    """Wait until all ranks make the same call."""
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
    """Raise if the ranks make different calls."""
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


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group in the world; those that torch returns may be of a class of ours (`groups.py`)."""
    return tuple(map(int, dist.get_process_group_ranks(group)))


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the collectives of a group wait: what it was made with."""
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):  # some backends have no such option
            limit: timedelta = group._get_backend(device).options._timeout
            return limit
    return _USUAL_LIMIT


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


class Arrival:
    """A rank that has come to a call, where others may be missing."""

    def __init__(self, group: dist.ProcessGroup, call: Call) -> None:
        self._group, self._call = group, call
        self._began_seconds = time.monotonic()
        self._number = _leave_word(group, call)

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
        waited = f"within {time.monotonic() - self._began_seconds:.0f} s"
        if any(words in str(error).lower() for words in ("closed by peer", "connection reset", "broken pipe")):
            waited += ", when the connection to a rank was closed, as it is when a process ends or gives up"
        name, own = self._group.group_name, dist.get_rank()
        others = {rank: _words_of(rank) for rank in global_ranks(self._group) if rank != own}
        absent = {
            rank: words
            for rank, words in others.items()
            if not any(group == name and number >= self._number for group, number, _ in words)
        }
        if not absent:
            return (
                f"The ranks did not come together at {self._call} {waited}: one of them may have failed, or have been "
                f"waited for longer than the process group's time limit ({error})."
            )
        last = [
            f"The last that rank {rank} called was {words[-1][-1]}."
            if words
            else f"Rank {rank} has called nothing yet."
            for rank, words in list(absent.items())[:_NAMED]
        ]
        return (
            f"{_named(list(absent)).capitalize()} did not call {self._call.name} {waited}: all ranks of the process "
            f"group have to, and this one called {self._call}. {' '.join(last)}"
        )


_Words = tuple[str, int, str]  # the group's name, the number of the call in it, the call

_counts: Counter[str] = Counter()
_latest: deque[_Words] = deque(maxlen=_REMEMBERED)
_world: weakref.ref[dist.ProcessGroup] | None = None


def _leave_word(group: dist.ProcessGroup, call: Call) -> int:
    """Tell in the store what this rank calls, and return the number of the call in its group."""
    global _world
    world, name = dist.group.WORLD, group.group_name
    if world is not None and (
        _world is None or _world() is not world
    ):  # torch.distributed began anew: names come again
        _world = weakref.ref(world)
        _counts.clear()
        _latest.clear()
    _counts[name] += 1
    _latest.append((name, _counts[name], str(call)))
    with suppress(Exception):  # a store that is gone is no reason to fail
        _store().set(_key(dist.get_rank()), json.dumps(list(_latest)))
    return _counts[name]


def _words_of(rank: int) -> list[_Words]:
    """Return what a rank called, the latest last; nothing if it has left no word. Never waits."""
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
    """Return the different values, each with the ranks that have it."""
    who: dict[str, list[int]] = {}
    for rank, value in zip(global_ranks(group), values, strict=True):
        who.setdefault(value, []).append(rank)
    some = [f"{value} ({_named(have)})" for value, have in list(who.items())[:_NAMED]]
    return ", ".join(some) + (", ..." if len(who) > _NAMED else "")


def _named(ranks: Sequence[int]) -> str:
    some = f"{', '.join(map(str, ranks[:_NAMED]))}{', ...' if len(ranks) > _NAMED else ''}"
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
