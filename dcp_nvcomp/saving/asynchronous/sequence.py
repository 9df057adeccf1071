"""The asynchronous saves of one process group, in their order, two at most under way at once.

Collectives of two saves must not meet, nor those of training. So there are two gloo groups of our own, which saves use
in turn, and a third one, over which the ranks of a save first agree that it is the same one everywhere.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.calls.process_groups import give_back, is_registered
from dcp_nvcomp.calls.ranks import Call, meet
from dcp_nvcomp.errors import CheckpointError, EarlierSaveError, RanksDifferError
from dcp_nvcomp.saving.asynchronous.staging import Staging, UploadFuture

logger = logging.getLogger(__name__)

_AT_ONCE = 2
GROUP_COUNT = 1 + _AT_ONCE


class SaveSequence:
    """The asynchronous saves of one group. All ranks have to make one for a group at the same time."""

    def __init__(self, group: dist.ProcessGroup | None, own_groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self.group = group
        self._own_groups = own_groups
        made: Sequence[dist.ProcessGroup | None] = own_groups or [None] * GROUP_COUNT
        self._for_agreeing, self._for_saves = made[0], list(made[1:])
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
        for _, before in self._latest:  # the next save is there, so the earlier ones are late
            before.hurry()
        if self._began_seconds is not None:  # as far apart as the last two, the next one is expected
            staging.within_seconds = min(staging.within_seconds or math.inf, now - self._began_seconds)
        self._began_seconds = now
        self._count += 1
        self._latest = [*self._latest, (upload, staging)][-_AT_ONCE:]
        # not a daemon: the interpreter waits for it before it exits
        threading.Thread(
            target=self._run, args=(self._count, call, save, staging, upload, earlier), name="dcp-async-save"
        ).start()
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
            self._agree(number, call, earlier)
            metadata = save(self._for_saves[number % _AT_ONCE])
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

    def _agree(self, number: int, call: Call, earlier: Sequence[UploadFuture]) -> None:
        """Make sure that all ranks are at the same save, and that none has an earlier error that was not looked at."""
        error = next((error for upload in earlier if (error := upload.take_unseen_error()) is not None), None)
        told = meet(self._for_agreeing, call, (number, error is not None))
        counts, failed = [count for count, _ in told], [has_failed for _, has_failed in told]
        if any(failed):
            for upload in earlier:  # other ranks may have seen it fail, and this one not yet
                upload.was_looked_at = True
            whose = f"on rank {failed.index(True)}" if error is None else f"{type(error).__name__}: {error}"
            raise EarlierSaveError(
                f"An earlier asynchronous save failed, and nobody has looked at its future ({whose}). This save was "
                "not made. Look at `upload_completion` of each save, or catch this error and go on."
            ) from error
        if len(set(counts)) > 1:
            self._count = max(counts)  # so that the next ones fit again
            raise RanksDifferError(
                f"The ranks are not at the same asynchronous save: they have begun {counts}. Each rank has to call "
                "async_save as often as the others; this save was not made."
            )
