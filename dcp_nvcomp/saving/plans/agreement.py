"""What ranks exchange before they plan: whether all keep the same plan, else what their states are made of.

Before a save each rank sends a `Proposal`. One rank's proposal never decides what that rank plans, only how all do:

    all keep the plan of one id       they use it
    all have described their states   each computes the plans of all; parts of states that differ between ranks are
                                      sent around first (`gather_parts`)
    else                              DCP's coordinator plans

A process keeps plans, and finds them by who saves together, the planner's options, and the structure of the state. A
plan has an id, and is used again only if all ranks find the plan of one id: then each has the structure that it had at
that planning, from which the global plan follows.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp.calls.ranks import Call, global_ranks, meet, together
from dcp_nvcomp.saving.plans.global_plan import ComparedKeys, GlobalPlan
from dcp_nvcomp.saving.plans.layouts import Ints
from dcp_nvcomp.saving.plans.meshes import ComparedShards, Members
from dcp_nvcomp.saving.plans.structure import Described, Part, Place, Structure

_MOST_BROADCASTS: Final = 64
_MOST_NBYTES: Final = 64 << 20  # of variants of a part, on each rank
_MAX_PLANS: Final = 8
# An item takes about 500 bytes, and its name and place in a coordinator's global plan another 300.
_MAX_ITEMS: Final = 1 << 20


@dataclass(frozen=True)
class Proposal:
    kept_id: str | None  # of the plan that it keeps for its state
    may_keep: bool
    digests: tuple[bytes, ...] = ()  # of the parts of its state; none if that can't be described
    nbytes: tuple[int, ...] = ()  # what each part takes, about
    places: tuple[Place, ...] = ()
    members: tuple[Members, ...] = ()  # of its meshes
    fresh_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @staticmethod
    def of(kept_id: str | None, described: Described | None, *, may_keep: bool) -> Proposal:
        parts = () if described is None else described.parts
        return Proposal(
            kept_id,
            may_keep,
            tuple(part.digest for part in parts),
            tuple(part.nbytes for part in parts),
            () if described is None else described.places,
            () if described is None else described.members,
        )


@dataclass(frozen=True)
class Agreement:
    proposals: Sequence[Proposal]  # of all ranks
    use_kept: bool
    plan_id: str | None  # of the plan that is used or made; None if it is not to be kept

    @property
    def all_described(self) -> bool:
        return all(proposal.digests for proposal in self.proposals)


def agree(mine: Proposal, group: dist.ProcessGroup | None, call: Call) -> Agreement:
    proposals = meet(group, call, mine)
    if not all(proposal.may_keep for proposal in proposals):
        return Agreement(proposals, use_kept=False, plan_id=None)
    kept_ids = {proposal.kept_id for proposal in proposals}
    if len(kept_ids) == 1 and mine.kept_id is not None:
        return Agreement(proposals, use_kept=True, plan_id=mine.kept_id)
    return Agreement(proposals, use_kept=False, plan_id=proposals[0].fresh_id)


def gather_parts(
    mine: Described, proposals: Sequence[Proposal], group: dist.ProcessGroup | None
) -> tuple[list[Part | bytes], Ints] | None:
    """Return the distinct parts of all ranks' states, and which three of them each rank has; None if it is too much.

    Of what is the same on all ranks nothing is sent. A few variants are broadcast, packed, by the lowest ranks that
    have them.
    """
    parts = list[Part | bytes]()
    columns = []
    for column, own in enumerate(mine.parts):
        digests = [proposal.digests[column] for proposal in proposals]
        holders: dict[bytes, int] = {}
        for rank, digest in enumerate(digests):
            holders.setdefault(digest, rank)
        numbers = {digest: len(parts) + number for number, digest in enumerate(holders)}
        columns.append([numbers[digest] for digest in digests])
        if len(holders) == 1:
            parts.append(own)
            continue
        assert group is not None
        if max(proposal.nbytes[column] for proposal in proposals) * len(holders) > _MOST_NBYTES:
            return None
        with together(group):
            if len(holders) <= _MOST_BROADCASTS:
                sent = [_broadcast(own.packed, rank, group) for rank in holders.values()]
            else:
                everyones: list[bytes] = [b""] * len(proposals)
                dist.all_gather_object(everyones, own.packed, group=group)
                sent = [everyones[rank] for rank in holders.values()]
        parts += sent
    return parts, np.array(columns, np.int64).T


def _broadcast(mine: bytes, rank: int, group: dist.ProcessGroup) -> bytes:
    ranks = global_ranks(group)
    sent = [mine]
    dist.broadcast_object_list(sent, src=ranks[rank], group=group)
    return sent[0]


@dataclass(frozen=True)
class PlanKey:
    ranks: tuple[int, ...]  # the global ranks that save together; empty without torch.distributed
    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True
    dedup_save_to_lowest_rank: bool = False
    derived: tuple[tuple[str, str], ...] = ()  # keys of masters, and of the weights that are written with them


@dataclass(frozen=True)
class KeptPlan:
    plan_id: str
    key: PlanKey
    structure: Structure
    described: Described | None  # None if DCP planned it
    final: SavePlan
    compared_keys: ComparedKeys  # of this rank
    compared_shards: ComparedShards
    everyones: GlobalPlan | None  # on the coordinator only

    @property
    def item_count(self) -> int:
        return len(self.final.items) + (0 if self.everyones is None else self.everyones.item_count)


class KeptPlans:
    def __init__(self, max_plans: int = _MAX_PLANS, max_items: int = _MAX_ITEMS) -> None:
        self._plans: deque[KeptPlan] = deque(maxlen=max_plans)
        self._max_items = max_items
        self._lock = threading.Lock()

    def find(self, key: PlanKey, structure: Structure) -> KeptPlan | None:
        with self._lock:
            for plan in reversed(self._plans):
                if plan.key == key and plan.structure == structure:
                    return plan
        return None

    def keep(self, plan: KeptPlan) -> None:
        """Keep a plan, instead of that for the same structure and of the oldest ones; not one that is too large."""
        if plan.item_count > self._max_items:
            return
        with self._lock:
            for other in list(self._plans):
                if other.key == plan.key and other.structure == plan.structure:
                    self._plans.remove(other)
            self._plans.append(plan)
            while sum(kept.item_count for kept in self._plans) > self._max_items:
                self._plans.popleft()
