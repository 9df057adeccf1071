"""Which rank writes what several ranks have: so that none has much more to write than others.

What one rank alone has is counted first. Then the largest of the rest goes to whichever of its ranks has the least so
far, and so on to the smallest. DCP counts the whole tensor for each of its shards, and takes tensors in their order: on
8 x 8 ranks of HSDP with a replicated embedding the busiest rank then writes half as much again.

A master and its weight (saving/derived.py) count as one: only the rank that writes both can derive the one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.derived import weight_fqn

RECORD_NBYTES: Final = 64 << 10  # a record takes as long to make as so many bytes to write

_Key = tuple[str, Any]


def balanced(plans: Sequence[SavePlan], derived: Mapping[str, str] = MappingProxyType({})) -> list[SavePlan]:
    """Return the plans without what another rank writes."""
    ranks_of: dict[_Key, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks_of.setdefault(_key(item), []).append(rank)
    if all(len(ranks) == 1 for ranks in ranks_of.values()):
        return list(plans)
    weight_of = _weights(plans, ranks_of, derived) if derived else {}
    costs, loads = dict[_Key, dict[_Key, int]](), [0] * len(plans)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = _key(item)
            if len(ranks_of[key]) == 1:
                loads[rank] += _cost_nbytes(item)
            else:
                costs.setdefault(weight_of.get(key, key), {}).setdefault(key, _cost_nbytes(item))
    owners: dict[_Key, int] = {}
    numbers = {fqn: number for number, fqn in enumerate(dict.fromkeys(fqn for fqn, _ in ranks_of))}
    for key, of_each in sorted(costs.items(), key=lambda one: (-sum(one[1].values()), numbers[one[0][0]])):
        owner = min(ranks_of[key], key=lambda rank: (loads[rank], rank))
        owners.update(dict.fromkeys(of_each, owner))
        loads[owner] += sum(of_each.values())
    return [
        replace(plan, items=[item for item in plan.items if owners.get(_key(item), rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def _weights(
    plans: Sequence[SavePlan], ranks_of: Mapping[_Key, list[int]], derived: Mapping[str, str]
) -> dict[_Key, _Key]:
    """Map masters to their weights, where the same ranks have the same region of both."""
    planned = {_key(item): item.tensor_data for plan in plans for item in plan.items}
    found = dict[_Key, _Key]()
    for key, master in planned.items():
        other = (weight_fqn(key[0], derived) or "", key[1])
        weight = planned.get(other)
        if master is None or weight is None or ranks_of[other] != ranks_of[key]:
            continue
        is_pair = (master.properties.dtype, weight.properties.dtype) == (torch.float32, torch.bfloat16)
        if is_pair and (master.size, master.chunk) == (weight.size, weight.chunk):
            found[key] = other
    return found


def _key(item: WriteItem) -> _Key:
    return item.index.fqn, item.index.offset


def _cost_nbytes(item: WriteItem) -> int:
    return RECORD_NBYTES + planned_nbytes(item)
