"""Which keys have different values on different ranks: of those that are not sharded a checkpoint keeps one rank's.

Fingerprints of each rank's values go with its plan to the coordinator, and what differs comes back with the final
plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Final, Literal, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from dcp_nvcomp.errors import ConfigurationError, RanksDifferError
from dcp_nvcomp.saving.plans.fingerprints import fingerprints
from dcp_nvcomp.saving.plans.global_plan import ComparedKeys
from dcp_nvcomp.saving.plans.meshes import ComparedShards, differing_shards, of_several_meshes, shard_fingerprints

OnDifference = Literal["warn", "error"]
Keys = tuple[str, ...]

_SHOWN: Final = 8
_already_told: set[str] = set()


class _Sent(NamedTuple):
    """What goes with the local plan of a rank."""

    planner_data: Any
    values: array[int]
    keys: Keys | None  # None if the coordinator has kept them with the plan
    empty: Keys = ()  # those of empty containers
    shards: array[int] = array("I")  # fingerprints, too
    compared: ComparedShards | None = None  # which these are; None if the coordinator knows it


class _Told(NamedTuple):
    """What goes with the final plan of a rank."""

    planner_data: Any
    words: str


class Comparison:
    def __init__(self, ranks: Sequence[int], on_difference: OnDifference) -> None:
        self.ranks, self._on_difference = ranks or (0,), on_difference
        self._found: dict[str, int] | None = None
        self._empty: Keys = ()
        self._shards = array("I")
        self.own_shards = ComparedShards()
        self.everyones_shards: Sequence[ComparedShards] = ()  # where DCP plans; kept with the plan, on the coordinator
        self.words = ""
        self.place_warning = ""  # it depends on the structure alone, and is kept with the plan; on the coordinator

    def look(self, state: Mapping[str, Any]) -> None:
        if len(self.ranks) > 1:
            self._found = fingerprints(state)
            self._empty = tuple(key for key, value in state.items() if isinstance(value, Mapping | list) and not value)

    def look_at_shards(self, state: Mapping[str, Any], compared: ComparedShards) -> None:
        if len(self.ranks) > 1 and compared.keys:
            self.own_shards = compared
            self._shards = shard_fingerprints(state, compared.keys)

    @property
    def own_keys(self) -> ComparedKeys:
        return () if self._found is None else (tuple(self._found),)

    def sent(self, plan: SavePlan, known: ComparedKeys | None) -> SavePlan:
        """Return a local plan with the values' fingerprints, and their keys unless the coordinator has them."""
        if self._found is None and not self._shards:
            return plan
        if self._found is None:  # this rank could not look at them
            sent = _Sent(plan.planner_data, array("I"), None)
        elif known is None:
            sent = _Sent(plan.planner_data, array("I", self._found.values()), tuple(self._found), self._empty)
        else:
            values = array("I", [self._found[key] for keys in known for key in keys])
            sent = _Sent(plan.planner_data, values, None)
        compared = None if known is not None or self.own_shards.places is None else self.own_shards
        return dataclasses.replace(plan, planner_data=sent._replace(shards=self._shards, compared=compared))

    def compared(
        self,
        plans: Sequence[SavePlan],
        keys: Sequence[ComparedKeys] | None,
        place_warning: str | None,
        differing: Callable[[Sequence[array[int]]], Mapping[str, Sequence[int]]] | None = None,
    ) -> tuple[list[SavePlan], list[ComparedKeys]]:
        """Compare all ranks' fingerprints, and where their values are unless that is kept; on the coordinator.

        `differing` compares those of shards, by a plan that is kept or that the ranks have computed.
        """
        sent = [plan.planner_data if isinstance(plan.planner_data, _Sent) else None for plan in plans]
        plain = [
            plan if one is None else dataclasses.replace(plan, planner_data=one.planner_data)
            for plan, one in zip(plans, sent, strict=True)
        ]
        if keys is None:
            keys = [() if one is None or one.keys is None else (one.keys,) for one in sent]
        own = [keys[rank] if one is not None and one.values else () for rank, one in enumerate(sent)]
        words = list[str]()
        if any(one is not None for one in sent):
            values = [array("I") if one is None else one.values for one in sent]
            words.append(_words(_differing(own, values), self.ranks))
            shards = [array("I") if one is None else one.shards for one in sent]
            found: Mapping[str, Sequence[int]]
            if differing is None:
                compared = [one.compared if one is not None and one.compared else ComparedShards() for one in sent]
                self.everyones_shards = of_several_meshes(compared)
                found = differing_shards(self.everyones_shards, shards)
            else:
                found = differing(shards)
            words.append(_shard_words(found, self.ranks))
        if place_warning is None:
            paths = [plan.planner_data or {} for plan in plain]
            place_warning = place_words(paths, [() if one is None else one.empty for one in sent], self.ranks)
        self.place_warning = place_warning
        self.words = " ".join(filter(None, [*words, place_warning]))
        if self.words and self._on_difference == "error":
            raise ConfigurationError(f"{self.words} Nothing was saved.")
        return plain, list(keys)

    def told(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the final plans with what differs, if anything does; on the coordinator."""
        if not self.words:
            return plans
        return [dataclasses.replace(plan, planner_data=_Told(plan.planner_data, self.words)) for plan in plans]

    def received(self, plan: SavePlan) -> SavePlan:
        """Return this rank's final plan as the planner made it."""
        if not isinstance(plan.planner_data, _Told):
            return plan
        self.words = plan.planner_data.words
        return dataclasses.replace(plan, planner_data=plan.planner_data.planner_data)

    def warn(self, stacklevel: int) -> None:
        """Warn of what differs, once in a process for the same keys."""
        if self.words and self.words not in _already_told:
            _already_told.add(self.words)
            warnings.warn(self.words, RuntimeWarning, stacklevel=stacklevel + 1)


def check_same_place(plans: Sequence[SavePlan]) -> None:
    """Raise if the local plans of the ranks are for different places; planners may leave these out."""
    places: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, str):
            places.setdefault(plan.storage_data, rank)
    if len(places) > 1:
        said = ", ".join(f"{place!r} (rank {rank})" for place, rank in places.items())
        raise RanksDifferError(f"The ranks save with different values of path: {said}. Give all ranks the same.")


def expect_same_kinds(plans: Sequence[SavePlan], ranks: Sequence[int]) -> None:
    """Refuse a key that is a tensor on some ranks and an object on others: no checkpoint can have both."""
    kinds: tuple[dict[str, int], dict[str, int]] = ({}, {})  # the first rank that has it as a tensor, and as an object
    for rank, plan in enumerate(plans):
        for item in plan.items:
            kinds[item.type == WriteItemType.BYTE_IO].setdefault(item.index.fqn, rank)
    tensors, objects = kinds
    both = [fqn for fqn in objects if fqn in tensors]
    if both:
        named = [f"{fqn!r} (rank {ranks[tensors[fqn]]} and {ranks[objects[fqn]]})" for fqn in both[:_SHOWN]]
        raise ConfigurationError(
            f"What is a tensor on one rank is a Python object on another, under one key: {_listed(named, both)}. "
            "Give all ranks tensors, or what belongs to a rank a key of its own, as in state[f'loader.{rank}']. "
            "Nothing was saved."
        )


def place_words(paths: Sequence[Mapping[str, Any]], empty: Sequence[Keys], ranks: Sequence[int]) -> str:
    """Return which values no nested state can have both; an empty container beside a filled one is no such value."""
    if all(part == paths[0] for part in paths):
        return ""
    values: dict[Any, tuple[str, int]] = {}  # one of those that have it, by place
    for part, without, rank in zip(paths, map(set, empty), ranks, strict=True):
        own = part if without.isdisjoint(part) else {fqn: path for fqn, path in part.items() if fqn not in without}
        values.update(zip(own.values(), zip(own, itertools.repeat(rank)), strict=False))
    inside: dict[Any, dict[type, tuple[str, int]]] = {}  # by place: a value in a dict there, and one in a list
    for path, value in values.items():
        if all(type(part) in (str, int) for part in path):  # DCP's own data; ours has the keys beside them
            for end in range(1, len(path)):
                inside.setdefault(path[:end], {}).setdefault(type(path[end]), value)
    pairs = [(next(iter(below.values())), values[place]) for place, below in inside.items() if place in values]
    pairs += [(below[str], below[int]) for below in inside.values() if len(below) > 1]
    named = [
        f"{one!r} on rank {rank} and {other!r} on rank {its}" for (one, rank), (other, its) in pairs if one != other
    ]
    if not named:
        return ""
    return (
        "Ranks have a container and a value, or a dict and a list, in the same place: "
        f"{_listed(named[:_SHOWN], named)}. A checkpoint has both, and each can only be loaded into its own kind: give "
        "what belongs to a rank a key of its own, as in state[f'logger.{rank}']."
    )


def _listed(named: Sequence[str], all_of_them: Sized) -> str:
    more = len(all_of_them) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _differing(keys: Sequence[ComparedKeys], values: Sequence[array[int]]) -> dict[str, list[int]]:
    """Return the keys under which ranks differ: the first rank that has one, and those that differ from it."""
    first: dict[str, tuple[int, int]] = {}
    differing: dict[str, list[int]] = {}
    usual: dict[int, tuple[Keys, array[int]]] = {}  # the first rank's, by their places in its lists
    for rank, (lists, numbers) in enumerate(zip(keys, values, strict=True)):
        begin = 0
        for at, some in enumerate(lists):
            pair = some, numbers[begin : begin + len(some)]
            begin += len(some)
            if usual.setdefault(at, pair) == pair and usual[at] is not pair:  # usual, and quick
                continue
            for key, value in zip(*pair, strict=True):
                holder, there = first.setdefault(key, (rank, value))
                if value != there:
                    differing.setdefault(key, [holder]).append(rank)
    return differing


def _words(differing: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> str:
    if not differing:
        return ""
    return (
        "Ranks have different values under the same key, of which a checkpoint keeps one: "
        f"{_with_ranks(differing, ranks)}. Give what belongs to a rank a key of its own, as in "
        "state[f'loader.{rank}'], or a data loader to TrainingState(dataloader=...); what should be the same has "
        "diverged."
    )


def _shard_words(differing: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> str:
    if not differing:
        return ""
    return (
        "Meshes of different ranks have different shards under the same key, of which a checkpoint keeps one: "
        f"{_with_ranks(differing, ranks)}. Give each pipeline stage keys of its own, as in state[f'stage{{stage}}'], "
        "or number the layers through all stages; what should be the same has diverged."
    )


def _with_ranks(differing: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> str:
    named = [
        f"{key!r} (rank {ranks[first]} and {', '.join(str(ranks[other]) for other in others[:_SHOWN])}"
        f"{', ...' if len(others) > _SHOWN else ''})"
        for key, (first, *others) in list(differing.items())[:_SHOWN]
    ]
    return _listed(named, differing)
