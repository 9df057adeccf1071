"""The replicas of a run: each saves the whole state for itself, in its own nodes' fast tiers.

Replicas keep the same shards anyway, so nothing of these moves. The little that is a rank's own goes to the others
while training waits.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from dcp_nvcomp.calls.ranks import give_back, global_ranks, limit_of, offer_of, take
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.runs.options import REPLICAS
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.replicas.parts import (
    Path,
    digest_of,
    entries,
    is_sharded,
    joined,
    missing_on,
    own_of,
    whole_sets,
    with_entries,
)
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
    """What one rank tells the others."""

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
