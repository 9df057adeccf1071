"""Shards that ranks of several meshes have under one key: replicas, or of a checkpoint all but one would be lost.

Stages of a pipeline that name their layers alike, each sharded on a mesh of its own, look like replicas in a plan. So
the shards of one place are compared where their meshes have different ranks. Within a mesh torch keeps replicas equal.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from dcp_nvcomp.saving.plans.fingerprints import fingerprints

Members = int


@dataclass(frozen=True)
class ComparedShards:
    """The shards of a rank that are compared with those of other meshes."""

    keys: tuple[str, ...] = ()
    # of each where it begins, and who is in its mesh; None if that follows from a plan that the ranks have computed
    places: tuple[tuple[tuple[int, ...], Members], ...] | None = None


def members_of(ranks: Iterable[int]) -> Members:
    """Return a number that stands for these ranks, in any order."""
    data = array("q", sorted(ranks)).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def on_some_ranks(plan: SavePlan, state: Mapping[str, Any], ranks: Iterable[int]) -> ComparedShards:
    """Return the shards of DTensors in a local plan of DCP's that ranks outside their meshes may have, too."""
    everyone = members_of(ranks)
    known: dict[int, Members] = {}  # of meshes by id
    found: dict[tuple[str, tuple[int, ...]], Members] = {}
    for item in plan.items:
        value = state.get(item.index.fqn)
        if isinstance(value, DTensor) and item.index.offset is not None:
            mesh = value.device_mesh
            members = known.get(id(mesh))
            if members is None:
                members = known[id(mesh)] = members_of(mesh.mesh.flatten().tolist())
            if members != everyone:
                found[item.index.fqn, tuple(item.index.offset)] = members
    keys = tuple(fqn for fqn, _ in found)
    return ComparedShards(keys, tuple((offset, members) for (_, offset), members in found.items()))


def shard_fingerprints(state: Mapping[str, Any], keys: Sequence[str]) -> array[int]:
    """Return a checksum of this rank's shard of each DTensor; nothing is run on the DTensors themselves."""
    with torch.no_grad():
        found = fingerprints({key: state[key].to_local() for key in keys})
    return array("I", [found.get(key, 0) for key in keys])


class Differing:
    """Collects the ranks whose shards differ from the first rank's, of each key those of one shard."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, list[int]]] = {}

    def add(self, key: str, shard: Any, first: int, rank: int) -> None:
        noted, ranks = self._found.setdefault(key, (shard, [first]))
        if noted == shard:
            ranks.append(rank)

    @property
    def ranks(self) -> dict[str, list[int]]:
        return {key: ranks for key, (_, ranks) in self._found.items()}


def of_several_meshes(compared: Sequence[ComparedShards]) -> Sequence[ComparedShards]:
    """Return the shards of all ranks; none if each is of one mesh, as the stages of most pipelines."""
    first: dict[tuple[str, tuple[int, ...]], Members] = {}
    for shards in compared:
        for key, (offset, members) in zip(shards.keys, shards.places or (), strict=True):
            if first.setdefault((key, offset), members) != members:
                return compared
    return ()


def differing_shards(compared: Sequence[ComparedShards], values: Sequence[array[int]]) -> dict[str, list[int]]:
    """Return the keys of shards that differ between meshes, and ranks that have one of them; of all ranks' shards."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Members, int]] = {}
    differing = Differing()
    for rank, (shards, numbers) in enumerate(zip(compared, values, strict=False)):
        for key, (offset, members), value in zip(shards.keys, shards.places or (), numbers, strict=False):
            holder, its, there = first.setdefault((key, offset), (rank, members, value))
            if members != its and value != there:
                differing.add(key, offset, holder, rank)
    return differing.ranks
