"""The plans that this process keeps: found again by who saves together, the planner's options, and the structure.

Each has an id that the ranks agreed on when they made it. It is used again only if all ranks find the plan of one id:
then each has the structure that it had at that planning, from which the global plan follows. Whatever one rank forgot,
or failed to plan, or can't plan from a structure, makes all of them plan anew, under another id.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp.saving.plans.global_plan import GlobalPlan
from dcp_nvcomp.saving.plans.structure import Structure

_MAX_PLANS = 8
# An item takes about 500 bytes, and its name and place in a coordinator's global plan another 300.
_MAX_ITEMS = 1 << 20


@dataclass(frozen=True)
class PlanKey:
    """What a plan belongs to, beside the structure.

    Attributes:
        ranks: the global ranks that save together; empty without torch.distributed.
        flatten_state_dict: option of DCP's planner.
        flatten_sharded_tensors: option of DCP's planner.
        dedup_save_to_lowest_rank: option of DCP's planner.
    """

    ranks: tuple[int, ...]
    flatten_state_dict: bool = True
    flatten_sharded_tensors: bool = True
    dedup_save_to_lowest_rank: bool = False


@dataclass(frozen=True)
class KeptPlan:
    """A plan that all ranks made together.

    Attributes:
        plan_id: what the ranks call it.
        key: what it belongs to.
        structure: of this rank's state.
        final: this rank's final plan.
        everyones: the global plan; on the coordinator only.
    """

    plan_id: str
    key: PlanKey
    structure: Structure
    final: SavePlan
    everyones: GlobalPlan | None

    @property
    def item_count(self) -> int:
        """How many items it holds."""
        return len(self.final.items) + (0 if self.everyones is None else self.everyones.shard_count)


class KeptPlans:
    """A few plans, the latest ones."""

    def __init__(self, max_plans: int = _MAX_PLANS, max_items: int = _MAX_ITEMS) -> None:
        self._plans: deque[KeptPlan] = deque(maxlen=max_plans)
        self._max_items = max_items
        self._lock = threading.Lock()

    def find(self, key: PlanKey, structure: Structure) -> KeptPlan | None:
        """Return the latest plan for this structure."""
        with self._lock:
            for plan in reversed(self._plans):
                if plan.key == key and plan.structure == structure:
                    return plan
        return None

    def keep(self, plan: KeptPlan) -> None:
        """Keep a plan, instead of that for the same structure, and of the oldest ones if there are too many.

        One of more items than all of them may hold, as a coordinator's of very many ranks, is not kept.
        """
        if plan.item_count > self._max_items:
            return
        with self._lock:
            for other in list(self._plans):
                if other.key == plan.key and other.structure == plan.structure:
                    self._plans.remove(other)
            self._plans.append(plan)
            while sum(kept.item_count for kept in self._plans) > self._max_items:
                self._plans.popleft()
