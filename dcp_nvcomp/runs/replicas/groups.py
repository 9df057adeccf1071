"""The process groups of replicas: one for each to save with, and those over which its asynchronous saves agree.

All ranks of the world make the groups of all replicas, in the same order, so that torch numbers them alike on all.
Where the run has a part of the world only, a replica's ranks make theirs among themselves, as torch can't do it
otherwise: it names such groups by how many the process has, which then must be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from dcp_nvcomp.saving.asynchronous.sequence import GROUP_COUNT, TIMEOUT, SaveSequence
from dcp_nvcomp.saving.kept import kept

__all__ = ["ReplicaGroups"]


class ReplicaGroups:
    """The groups of this rank's replica. All ranks of the run make them at the same time.

    Args:
        replicas: the global ranks of each replica.
        run: the process group of the run.

    Attributes:
        group: that of this rank's replica.
    """

    def __init__(self, replicas: Sequence[Sequence[int]], run: dist.ProcessGroup) -> None:
        own = next(one for one in replicas if dist.get_rank() in one)
        is_world = run is dist.group.WORLD
        made = []
        for replica in replicas if is_world else [own]:
            groups = [
                dist.new_group(list(replica), backend="gloo", timeout=TIMEOUT, use_local_synchronization=not is_world)
                for _ in range(1 + GROUP_COUNT)
            ]
            if replica is own:
                made = groups
        self.group: dist.ProcessGroup = made[0]
        self._made = made
        with kept().lock:
            kept().add_sequence(SaveSequence(self.group, made[1:]))

    def close(self) -> None:
        """Give the groups up; no save may be under way."""
        made, self._made = self._made, []
        if dist.is_initialized():
            for group in made:
                dist.destroy_process_group(group)
