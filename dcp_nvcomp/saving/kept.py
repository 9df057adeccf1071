"""What saves of a process keep for the next ones: plans, choices of codecs, segments, and which saves are under way.

Kept for the process and not by a writer: a new writer for each save is usual.
"""

from __future__ import annotations

import os
import threading

import torch.distributed as dist

from dcp_nvcomp.saving.asynchronous.segments import SegmentStores
from dcp_nvcomp.saving.asynchronous.sequence import SaveSequence
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.plans.kept_plans import KeptPlans

__all__ = ["Kept", "forget_all", "kept"]


class Kept:
    """What is kept.

    Attributes:
        plans: those of our own save calls.
        choices: what `auto` chose.
        stores: segments of asynchronous saves.
        lock: held while an asynchronous save begins.
    """

    def __init__(self) -> None:
        self.plans = KeptPlans()
        self.choices = RememberedChoices()
        self.stores = SegmentStores()
        self.lock = threading.Lock()
        self._sequences: list[SaveSequence] = []

    def sequence(self, group: dist.ProcessGroup | None) -> SaveSequence:
        """Return the asynchronous saves over a group; all ranks of a group call this in the same order.

        Args:
            group: the process group; None without torch.distributed.
        """
        self._sequences = [sequence for sequence in self._sequences if sequence.is_usable]
        for sequence in self._sequences:
            if sequence.group is group:
                return sequence
        made = SaveSequence(group)
        self._sequences.append(made)
        return made


_kept = Kept()


def kept() -> Kept:
    """Return what this process keeps."""
    return _kept


def forget_all() -> None:
    """Keep nothing, as a new process does; saves that are under way go on.

    A forked child begins like this: it has none of the threads of the saves, one of which may hold a lock, and neither
    connections nor page-locked memory of its own.
    """
    global _kept
    _kept = Kept()


os.register_at_fork(after_in_child=forget_all)
