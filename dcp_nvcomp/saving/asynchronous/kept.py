"""What asynchronous saves of a process keep from one to the next: segments, groups, and which saves are under way.

Kept for the process and not by a writer: a new writer for each save is usual.
"""

from __future__ import annotations

import os
import threading

import torch.distributed as dist

from dcp_nvcomp.saving.asynchronous.segments import SegmentStores
from dcp_nvcomp.saving.asynchronous.sequence import SaveSequence

__all__ = ["Kept", "kept"]


class Kept:
    """What is kept.

    Attributes:
        stores: the segments.
        lock: held while a save begins.
    """

    def __init__(self) -> None:
        self.stores = SegmentStores()
        self.lock = threading.Lock()
        self._sequences: list[SaveSequence] = []

    def sequence(self, group: dist.ProcessGroup | None) -> SaveSequence:
        """Return the saves over a group; all ranks of a group call this in the same order.

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


def _begin_again() -> None:
    """In a forked child: the threads of the saves are not there, and connections and page-locked memory not its own."""
    global _kept
    _kept = Kept()


os.register_at_fork(after_in_child=_begin_again)
