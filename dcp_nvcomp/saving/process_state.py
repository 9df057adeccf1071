"""What saves of a process keep for the next ones: plans, choices of codecs, segments, and which saves are under way.

The asynchronous saves of a process group are made in their order, two at most under way at once. Collectives of two
saves must not meet, nor those of training. So there are two gloo groups of our own, which saves use in turn. The ranks
of a save first agree that it is the same one everywhere.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.calls.process_groups import give_back, is_registered, own_groups
from dcp_nvcomp.calls.ranks import Call, meet
from dcp_nvcomp.engines.cuda.hashing import DeviceHashes
from dcp_nvcomp.errors import CheckpointError, EarlierSaveError, RanksDifferError
from dcp_nvcomp.saving.asynchronous.background import BackgroundProcess
from dcp_nvcomp.saving.asynchronous.device_copies import CudaMemory, DeviceMemory
from dcp_nvcomp.saving.asynchronous.segments import SegmentStores
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegments
from dcp_nvcomp.saving.asynchronous.staging import Staging
from dcp_nvcomp.saving.asynchronous.upload_future import UploadFuture
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.plans.agreement import KeptPlans
from dcp_nvcomp.saving.references import KnownShards


class ProcessState:
    def __init__(self) -> None:
        self.plans = KeptPlans()
        self.choices = RememberedChoices()
        self.shards = KnownShards()
        self.device_hashes = DeviceHashes()
        self.stores = SegmentStores()
        self.shared = SharedSegments()
        self.device_memory: DeviceMemory = CudaMemory()
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
        made = SaveSequence(group, () if group is None else own_groups(group, call, _AT_ONCE))
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


_kept = ProcessState()
# What a forked child got from its parent. Kept for good: the destructor of a process group waits for threads that the
# child does not have.
_of_parents: list[ProcessState] = []


def process_state() -> ProcessState:
    return _kept


def forget_all() -> None:
    """Keep nothing, as a new process does; saves that are under way go on."""
    global _kept
    before, _kept = _kept, ProcessState()
    before.free()


def _begin_again() -> None:
    """In a forked child: it has none of the threads of the saves, one of which may hold a lock, nor what they share."""
    global _kept
    before, _kept = _kept, ProcessState()
    before.abandon()
    _of_parents.append(before)


os.register_at_fork(after_in_child=_begin_again)
atexit.register(lambda: _kept.free())


logger = logging.getLogger(__name__)

_AT_ONCE = 2  # a save begins when the one before the last is over, so two saves never use a group at a time


class SaveSequence:
    """The asynchronous saves of one group. All ranks have to make one for a group at the same time."""

    def __init__(self, group: dist.ProcessGroup | None, own_groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self.group = group
        self._own_groups = own_groups
        self._in_turn: Sequence[dist.ProcessGroup | None] = own_groups or [None] * _AT_ONCE
        self._is_sound = True
        self._count = 0
        self._began_seconds: float | None = None
        self._latest: list[tuple[UploadFuture, Staging]] = []

    @property
    def is_usable(self) -> bool:
        return self.group is None or is_registered(self.group)

    def end(self) -> None:
        """Wait for the saves that are under way, and give the groups back."""
        for upload, _ in self._latest:
            upload.wait()
        if self._is_sound:
            give_back(self._own_groups)

    def wait_for_room(self) -> None:
        """Wait until another save may begin; raises nothing that other ranks would not raise too."""
        if self._latest:
            upload, staging = self._latest[-1]
            if staging.completion.exception() is not None:  # it is over soon: then the next save can raise it
                upload.wait()
        if len(self._latest) == _AT_ONCE:
            self._latest[0][0].wait()

    @property
    def last(self) -> UploadFuture | None:
        return self._latest[-1][0] if self._latest else None

    def begin(self, save: Callable[[dist.ProcessGroup | None], Metadata], staging: Staging, call: Call) -> UploadFuture:
        upload, now = UploadFuture(), time.monotonic()
        earlier = [upload for upload, _ in self._latest]
        for _, other in self._latest:  # the next save is there, so the earlier ones are late
            other.hurry()
        if self._began_seconds is not None:  # as far apart as the last two, the next one is expected
            staging.within_seconds = min(staging.within_seconds or math.inf, now - self._began_seconds)
        self._began_seconds = now
        self._count += 1
        # not a daemon: the interpreter waits for it before it exits
        thread = threading.Thread(
            target=self._run, args=(self._count, call, save, staging, upload, earlier), name="dcp-async-save"
        )
        before, self._latest = self._latest, [*self._latest, (upload, staging)][-_AT_ONCE:]
        try:
            thread.start()
        except Exception as error:  # the system has no thread left: the next save must not wait for this one
            self._latest = before
            staging.failed(error)
            raise
        return upload

    def _run(
        self,
        number: int,
        call: Call,
        save: Callable[[dist.ProcessGroup | None], Metadata],
        staging: Staging,
        upload: UploadFuture,
        earlier: Sequence[UploadFuture],
    ) -> None:
        try:
            group = self._in_turn[number % _AT_ONCE]
            self._agree(call, group, earlier)
            metadata = save(group)
        except BaseException as error:
            if not isinstance(error, EarlierSaveError | RanksDifferError):
                logger.error("An asynchronous save failed: %s: %s", type(error).__name__, error)
            if not isinstance(error, CheckpointError) or getattr(error, "in_vain", False):
                self._is_sound = False  # collectives may have failed: what is over them is not known
            staging.failed(error)
            upload.set_exception(error)
            return
        try:
            staging.staged()  # unless the writer has said so long ago
        except BaseException as error:
            upload.set_exception(error)
        else:
            upload.set_result(metadata)

    def _agree(self, call: Call, group: dist.ProcessGroup | None, earlier: Sequence[UploadFuture]) -> None:
        """Make sure that all ranks make the same save, and that none has an earlier error that was not looked at."""
        error = next((error for upload in earlier if (error := upload.take_unseen_error()) is not None), None)
        failed = meet(group, call, error is not None)
        if any(failed):
            for upload in earlier:  # other ranks may have seen it fail, and this one not yet
                upload.was_looked_at = True
            whose = f"on rank {failed.index(True)}" if error is None else f"{type(error).__name__}: {error}"
            raise EarlierSaveError(
                f"An earlier asynchronous save failed, and its future was not looked at ({whose}). This save was "
                "not made. Look at `upload_completion` of each save, or catch this error and go on."
            ) from error
