"""Before a save: do all ranks keep the same plan, and may they keep the next one?

One small collective, the first of a save: it also says whether all ranks make the same one. What a rank answers never
decides what it plans, only whether all of them plan anew.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import torch.distributed as dist

from dcp_nvcomp.calls.ranks import Call, meet


@dataclass(frozen=True)
class Proposal:
    """What one rank brings.

    Attributes:
        kept_id: id of the plan that it keeps for its state; None if it has none.
        may_keep: True if a plan for its state can be kept.
        fresh_id: an id for the plan to make.
    """

    kept_id: str | None
    may_keep: bool
    fresh_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Agreement:
    """What the ranks do.

    Attributes:
        use_kept: True if all use the plan that they keep.
        plan_id: id of the plan; None if it can't be kept.
    """

    use_kept: bool
    plan_id: str | None


def agree(mine: Proposal, group: dist.ProcessGroup | None, call: Call) -> Agreement:
    """Agree with the other ranks."""
    proposals = meet(group, call, mine)
    if not all(proposal.may_keep for proposal in proposals):
        return Agreement(False, None)
    kept_ids = {proposal.kept_id for proposal in proposals}
    if len(kept_ids) == 1 and mine.kept_id is not None:
        return Agreement(True, mine.kept_id)
    return Agreement(False, proposals[0].fresh_id)
