"""The plans that this process keeps: found again by who saves together, the planner's options, and the structure.

A plan has an id, and is used again only if all ranks find the plan of one id: then each has the structure that it had
at that planning, from which the global plan follows.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp.saving.plans.global_plan import ComparedKeys, GlobalPlan
from dcp_nvcomp.saving.plans.structure import Described, Structure

_MAX_PLANS = 8
# An item takes about 500 bytes, and its name and place in a coordinator's global plan another 300.
_MAX_ITEMS = 1 << 20


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
