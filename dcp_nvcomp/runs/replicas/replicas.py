"""The replicas of a run: ranks that hold the whole state together, and save it in their own nodes' fast tiers.

Replicas keep the same shards anyway, so nothing of these moves. The little that is a rank's own goes to the others
while training waits.
"""

from __future__ import annotations

import hashlib
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_nvcomp.calls.process_groups import give_back, offer_of, take
from dcp_nvcomp.calls.ranks import global_ranks, limit_of
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.runs.options import REPLICAS
from dcp_nvcomp.runs.tiers.nodes import Nodes
from dcp_nvcomp.saving.asynchronous.async_save import end_sequence


@dataclass(frozen=True)
class Replica:
    """What this rank saves together with the ranks of its replica."""

    all: tuple[tuple[int, ...], ...]  # the ranks of each replica
    values: dict[str, Any]  # the state, with what this replica lacked
    group: dist.ProcessGroup  # the process group of this replica
    id: str  # what the saves of all replicas of this state have in common


@dataclass(frozen=True)
class _Offer:
    # what arrangements depend on: which ranks hold its tensors whole, and a digest of its entries
    layout: tuple[frozenset[frozenset[int]], bytes] | None
    own: bytes  # entries that other replicas lack, by the latest arrangement, pickled
    error: CheckpointError | None  # why it has none
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # an id for the save


class Replicas:
    """Arranges the ranks of a run in replicas, by what they save. All ranks call the same methods."""

    def __init__(self, ranks: Ranks, nodes: Nodes, group: dist.ProcessGroup) -> None:
        self._ranks, self._nodes = ranks, nodes
        self._global_ranks, self._limit = global_ranks(group), limit_of(group)
        self._layouts: list[Any] | None = None
        self._all: tuple[tuple[int, ...], ...] = ()
        self._owners: dict[Path, int] = {}
        self._group: dist.ProcessGroup | None = None

    def replica_of(self, values: dict[str, Any], until_idle: Callable[[], None]) -> Replica:
        """Return what this rank's replica saves of a state."""
        offers = self._offers(values)
        if self._layouts != [offer.layout for offer in offers]:
            self._arrange(values, offers, until_idle)
            offers = self._offers(values)
        own = next(one for one in self._all if self._ranks.rank in one)
        added = {
            path: value
            for rank, offer in enumerate(offers)
            if rank not in own and self._stands_in(own, rank) == self._ranks.rank
            for path, value in pickle.loads(offer.own).items()
        }
        here = {path for path, _ in entries(values)}
        lacking = {path: value for path, value in added.items() if path not in here}
        assert self._group is not None
        return Replica(self._all, with_entries(values, lacking), self._group, offers[0].id)

    def _offers(self, values: Mapping[str, Any]) -> list[_Offer]:
        """Exchange what ranks have; what fails on one of them is raised on all, as all wait for it here."""
        error: CheckpointError | None = None
        try:
            layout = (whole_sets(values.values(), self._global_ranks), digest_of(_paths(values)))
            mine = _Offer(layout, pickle.dumps(own_of(values, self._owners, self._ranks.rank)), None)
        except CheckpointError as raised:
            error = raised
        except Exception as raised:  # pickle lets through whatever an object's own methods raise
            error = ConfigurationError(
                f"A value that only one rank has can't be given to other replicas: {type(raised).__name__}: {raised}"
            )
        offers = self._ranks.gather(mine if error is None else _Offer(None, b"", error))
        failure = error or next((offer.error for offer in offers if offer.error is not None), None)
        if failure is not None:
            raise failure
        return offers

    def _arrange(self, values: Mapping[str, Any], offers: Sequence[_Offer], until_idle: Callable[[], None]) -> None:
        paths = self._ranks.gather(_paths(values))
        sets = [one for offer in offers if offer.layout is not None for one in offer.layout[0]]
        replicas = joined(self._ranks.count, [*sets, *self._nodes.domains()])
        if len(replicas) == 1:
            raise ConfigurationError(
                'copies="replicas": the state has no replicas on nodes in different failure domains. Use a number of '
                "copies, or shard the state over the ranks of one node only (HSDP)."
            )
        self._owners = missing_on(replicas, paths)
        if replicas != self._all:
            until_idle()
            self.close()
            own = next(one for one in replicas if self._ranks.rank in one)
            members = [self._global_ranks[rank] for rank in own]
            offered = self._ranks.gather(offer_of(members))
            (self._group,) = take(members, 1, [offered[rank] for rank in own], self._limit)
            self._all = replicas
        self._layouts = [offer.layout for offer in offers]

    def _stands_in(self, own: Sequence[int], rank: int) -> int:
        """Return which rank of this replica saves what another replica's rank offers."""
        other = next(one for one in self._all if rank in one)
        return own[other.index(rank) % len(own)]

    def close(self) -> None:
        """Give the process group of this rank's replica back; no save may be under way."""
        group, self._group, self._all, self._layouts = self._group, None, (), None
        if group is not None:
            end_sequence(group)
            give_back([group])


def replicas_for(copies: int | str, ranks: Ranks, nodes: Nodes, group: dist.ProcessGroup | None) -> Replicas | None:
    """Return what arranges replicas; None if copies are sent."""
    if copies != REPLICAS:
        return None
    if group is None:
        raise ConfigurationError(f"copies={copies!r} needs a process group: there are no replicas in one process.")
    return Replicas(ranks, nodes, group)


def _paths(values: Mapping[str, Any]) -> dict[Path, bool]:
    return {path: is_sharded(value) for path, value in entries(values)}


RankSet = frozenset[int]
Path: TypeAlias = tuple[Any, ...]


def whole_sets(values: Iterable[Any], ranks: Sequence[int]) -> frozenset[RankSet]:
    """Return the sets of ranks that hold a DTensor whole, of all DTensors that this rank has a part of."""
    found: dict[Any, frozenset[RankSet]] = {}
    for tensor in _tensors(values):
        sharded = tuple(not placement.is_replicate() for placement in tensor.placements)
        key = (tensor.device_mesh, sharded)
        if key not in found:
            found[key] = _sets_of(tensor, sharded, ranks)
    return frozenset().union(*found.values())


def _tensors(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif hasattr(value, "local_shards"):
            raise ConfigurationError(
                'copies="replicas" goes by the placements of DTensors, and this state has a '
                f"{type(value).__name__}: use fully_shard (FSDP2), or a number of copies."
            )


def is_sharded(value: Any) -> bool:
    """True if a value is a DTensor, or has some in it."""
    return next(_tensors([value]), None) is not None


def _sets_of(tensor: DTensor, sharded: Sequence[bool], ranks: Sequence[int]) -> frozenset[RankSet]:
    """Return the sets of ranks that differ in nothing but their coordinates on sharded dimensions of the mesh."""
    mesh = tensor.device_mesh.mesh
    replicated = [at for at, one in enumerate(sharded) if not one]
    order = replicated + [at for at, one in enumerate(sharded) if one]
    count = 1
    for at in replicated:
        count *= mesh.size(at)
    place_of = {rank: place for place, rank in enumerate(ranks)}
    rows = mesh.permute(order).reshape(count, -1).tolist()
    if not all(rank in place_of for row in rows for rank in row):
        raise ConfigurationError("The state has tensors on ranks that are not in the process_group of the run.")
    return frozenset(frozenset(place_of[rank] for rank in row) for row in rows)


def joined(count: int, sets: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Join what overlaps."""
    belongs_to = list(range(count))

    def root_of(rank: int) -> int:
        while belongs_to[rank] != rank:
            rank = belongs_to[rank]
        return rank

    for one in sets:
        first, *others = sorted(one)
        for other in others:
            low, high = sorted((root_of(first), root_of(other)))
            belongs_to[high] = low
    groups: dict[int, list[int]] = {}
    for rank in range(count):
        groups.setdefault(root_of(rank), []).append(rank)
    return tuple(tuple(group) for _, group in sorted(groups.items()))


def entries(values: Mapping[Any, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is no dict in a nested state, with its path."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from entries(value, (*at, key))
        else:
            yield (*at, key), value


def digest_of(paths: Mapping[Path, bool]) -> bytes:
    """Return a digest of paths, and of which entries are sharded."""
    return hashlib.sha256(repr(list(paths.items())).encode()).digest()


def missing_on(replicas: Sequence[Sequence[int]], paths: Sequence[Mapping[Path, bool]]) -> dict[Path, int]:
    """Return the entries that some replica lacks, with the first rank that has them."""
    found: dict[Path, int] = {}
    everywhere = set.intersection(*(set().union(*(paths[rank] for rank in one)) for one in replicas))
    for rank, own in enumerate(paths):
        for path, sharded in own.items():
            if path in everywhere:
                continue
            if sharded:
                raise ConfigurationError(
                    f'copies="replicas" needs replicas that hold the same tensors, and {path!r} is not on all of them '
                    "(stages of a pipeline?): use a number of copies."
                )
            found.setdefault(path, rank)
    dicts = {path[:depth] for own in paths for path in own for depth in range(1, len(path))}
    for path in found:
        if path in dicts:
            raise ConfigurationError(
                f'copies="replicas": {path!r} is an entry on some ranks, and a dict with entries on others: save the '
                "same kind of value on all, or use a number of copies."
            )
    return found


def own_of(values: Mapping[Any, Any], owners: Mapping[Path, int], rank: int) -> dict[Path, Any]:
    """Return the entries that a rank gives to replicas that lack them, in host memory."""
    if rank not in owners.values():
        return {}
    return {path: _on_host(value) for path, value in entries(values) if owners.get(path) == rank}


def _on_host(value: Any) -> Any:
    """Return a value whose tensors are in host memory, each in memory of its own: more of it would be pickled."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    if type(value) is dict:
        return {key: _on_host(one) for key, one in value.items()}
    return value


def with_entries(values: Mapping[Any, Any], added: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return a nested state with entries added, sorted so that all replicas have them in the same order."""
    result, below = dict(values), dict[Any, dict[Path, Any]]()
    for (key, *rest), value in added.items():
        if rest:
            below.setdefault(key, {})[tuple(rest)] = value
        else:
            result[key] = value
    for key, inner in below.items():
        result[key] = with_entries(result.get(key, {}), inner)
    if result.keys() == values.keys():
        return result
    return {key: result[key] for key in sorted(result, key=repr)}
