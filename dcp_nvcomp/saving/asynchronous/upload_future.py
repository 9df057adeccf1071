"""What `async_save` returns for the whole save: DCP's metadata once it is asked for, and whether it was."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.saving.plans.global_plan import PlannedMetadata


class UploadFuture(Future[Metadata]):
    """The future of a save, which notes whether its outcome was looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.was_looked_at = False
        self._plain: Metadata | None = None
        self._unfolding = threading.Lock()
        self.set_running_or_notify_cancel()  # from now on it can't be cancelled

    def result(self, timeout: float | None = None) -> Metadata:
        self._look(timeout)
        metadata = super().result()
        if not isinstance(metadata, PlannedMetadata):
            return metadata
        with self._unfolding:  # not before: of many shards it takes seconds
            if self._plain is None:
                self._plain = metadata.plain()
            return self._plain

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._look(timeout)
        return super().exception()

    def _look(self, timeout: float | None) -> None:
        super().exception(timeout)  # raises TimeoutError: then nothing was seen
        self.was_looked_at = True

    def wait(self) -> None:
        """Wait until the save is over, without looking at its outcome."""
        super().exception()

    def take_unseen_error(self) -> BaseException | None:
        """Return the error of a save that failed if it was not seen; from now on it counts as seen."""
        return None if self.was_looked_at or not self.done() else self.exception()
