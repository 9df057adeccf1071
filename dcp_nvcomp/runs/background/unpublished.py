"""What this rank has written for saves that failed: it goes at the next save, or a later one.

A rank that had finished when another one failed has its files in the durable tier still, nearly a whole checkpoint over
all ranks. Only the coordinator publishes, so it alone knows that a save was not published and never will be. It names
that save to all ranks, with the next one.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.runs.background.stages import Background
from dcp_nvcomp.saving.writer import NvcompWriter

logger = logging.getLogger(__name__)

# A disk removes in less what the next save needs the room of; training does not wait for a store that is out of order.
_ROOM_SECONDS: Final = 10.0


class Unpublished:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: dict[int, NvcompWriter] = {}  # by the numbers of the saves
        self._certain: list[int] = []  # the saves to name: this rank was their coordinator
        self._named: set[int] = set()  # those that were named, and are still under way or to be removed on this rank
        self._thread = Background("dcp-run-unpublished", _unexpected)

    @property
    def certain(self) -> int:
        """A save that certainly was not published, to be named to all ranks; 0 if this rank knows of none."""
        with self._lock:
            return self._certain[0] if self._certain else 0

    def failed(self, number: int, writer: NvcompWriter) -> None:
        """Note that a save has failed, and is over on this rank; `writer` made no other."""
        with self._lock:
            self._writers[number] = writer
            if writer.is_unpublished:
                self._certain.append(number)
            is_named = number in self._named
        if is_named:
            self._thread.do(self._remove)

    def remove(self, number: int) -> None:
        """Remove what this rank has written for a save that the coordinator has named, as soon as that is over here.

        Waits a while for it: the next save may need the room. What can't be removed is tried again at the next call.

        Args:
            number: that of the save; 0 if none is named now.
        """
        with self._lock:
            if number:
                self._named.add(number)
                self._certain = [one for one in self._certain if one != number]
            if self._thread.waiting or not self._named & self._writers.keys():
                return
        self._thread.do(self._remove)
        self._thread.wait_for(within_seconds=_ROOM_SECONDS)

    def _remove(self) -> None:
        with self._lock:
            over = {number: self._writers[number] for number in self._named & self._writers.keys()}
        for number, writer in over.items():
            try:
                is_done = writer.remove_unpublished()
            except CheckpointError as error:
                is_done = False
                logger.warning("Files of a failed save could not be removed yet: %s", error)
            if is_done:
                with self._lock:
                    del self._writers[number]
                    self._named.discard(number)


def _unexpected(error: BaseException) -> None:
    logger.error("Files of a failed save could not be removed: %s: %s", type(error).__name__, error)
