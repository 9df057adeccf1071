"""What saves of a process keep for the next ones: plans, choices of codecs, segments, and which saves are under way."""

from __future__ import annotations

import atexit
import os
import threading

import torch.distributed as dist

from dcp_nvcomp.calls.process_groups import own_groups
from dcp_nvcomp.calls.ranks import Call
from dcp_nvcomp.saving.asynchronous.background import BackgroundProcess
from dcp_nvcomp.saving.asynchronous.segments import SegmentStores
from dcp_nvcomp.saving.asynchronous.sequence import GROUP_COUNT, SaveSequence
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegments
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.plans.kept_plans import KeptPlans


class Kept:
    """What is kept."""

    def __init__(self) -> None:
        self.plans = KeptPlans()
        self.choices = RememberedChoices()
        self.stores = SegmentStores()
        self.shared = SharedSegments()
        self.lock = threading.Lock()
        self._sequences: list[SaveSequence] = []
        self._background: BackgroundProcess | None = None
        self._starting = threading.Lock()

    def sequence(self, group: dist.ProcessGroup | None, call: Call) -> SaveSequence:
        """Return the asynchronous saves over a group; all ranks of a group call this in the same order."""
        for sequence in list(self._sequences):
            if not sequence.is_usable:
                self._end(sequence)
            elif sequence.group is group:
                return sequence
        made = SaveSequence(group, () if group is None else own_groups(group, call, GROUP_COUNT))
        self._sequences.append(made)
        return made

    def end_sequence(self, group: dist.ProcessGroup) -> None:
        """Wait for the asynchronous saves over a group and release what they used; all its ranks call this."""
        for sequence in list(self._sequences):
            if sequence.group is group:
                self._end(sequence)

    def _end(self, sequence: SaveSequence) -> None:
        self._sequences.remove(sequence)
        sequence.end()

    def background(self) -> BackgroundProcess:
        with self._starting:
            if self._background is not None and self._background.start_failure is not None:
                raise OSError(self._background.start_failure)  # it would fail at each save, after seconds
            if self._background is None or not self._background.is_usable:
                self._background = BackgroundProcess()
            return self._background

    def free(self) -> None:
        """Free the memory that no save uses, and end the background process once it has nothing to do."""
        self.stores.clear()
        self.shared.clear()
        with self._starting:
            background, self._background = self._background, None
        if background is not None:
            background.retire()

    def abandon(self) -> None:
        """Forget what belongs to the process that this one was forked from."""
        self.shared.abandon()
        if self._background is not None:
            self._background.abandon()


_kept = Kept()
# What a forked child got from its parent. Kept for good: the destructor of a process group waits for threads that the
# child does not have.
_of_parents: list[Kept] = []


def process_state() -> Kept:
    """Return what this process keeps."""
    return _kept


def forget_all() -> None:
    """Keep nothing, as a new process does; saves that are under way go on."""
    global _kept
    before, _kept = _kept, Kept()
    before.free()


def _begin_again() -> None:
    """In a forked child: it has none of the threads of the saves, one of which may hold a lock, nor what they share."""
    global _kept
    before, _kept = _kept, Kept()
    before.abandon()
    _of_parents.append(before)


os.register_at_fork(after_in_child=_begin_again)
atexit.register(lambda: _kept.free())
