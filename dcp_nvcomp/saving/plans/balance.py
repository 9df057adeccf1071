"""Which rank writes what several ranks have: so that none has much more to write than others.

What one rank alone has is counted first. Then the largest of the rest goes to whichever of its ranks has the least so
far, and so on to the smallest. DCP counts the whole tensor for each of its shards, and takes tensors in their order: on
8 x 8 ranks of HSDP with a replicated embedding the busiest rank then writes half as much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcp_nvcomp.saving.data_files import planned_nbytes

RECORD_NBYTES: Final = 64 << 10  # a record takes as long to make as so many bytes to write

_Key = tuple[str, Any]


def balanced(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans without what another rank writes."""
    ranks_of: dict[_Key, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks_of.setdefault(_key(item), []).append(rank)
    if all(len(ranks) == 1 for ranks in ranks_of.values()):
        return list(plans)
    costs, loads = dict[_Key, int](), [0] * len(plans)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = _key(item)
            if len(ranks_of[key]) == 1:
                loads[rank] += _cost_nbytes(item)
            else:
                costs.setdefault(key, _cost_nbytes(item))
    owners: dict[_Key, int] = {}
    numbers = {fqn: number for number, fqn in enumerate(dict.fromkeys(fqn for fqn, _ in ranks_of))}
    for key, cost in sorted(costs.items(), key=lambda one: (-one[1], numbers[one[0][0]])):
        owner = owners[key] = min(ranks_of[key], key=lambda rank: (loads[rank], rank))
        loads[owner] += cost
    return [
        replace(plan, items=[item for item in plan.items if owners.get(_key(item), rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def _key(item: WriteItem) -> _Key:
    return item.index.fqn, item.index.offset


def _cost_nbytes(item: WriteItem) -> int:
    return RECORD_NBYTES + planned_nbytes(item)
