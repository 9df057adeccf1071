"""What this rank has written for saves that failed: it goes at the next save.

A rank that had finished when another one failed has its files in the durable tier still, nearly a whole checkpoint over
all ranks. Only the coordinator publishes, so it alone knows that a save was not published and never will be. It names
that save to all ranks, with the next one.
"""

from __future__ import annotations

import logging
import threading

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.saving.writer import NvcompWriter

logger = logging.getLogger(__name__)


class Unpublished:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: dict[int, NvcompWriter] = {}  # by the numbers of the saves
        self._certain: list[int] = []  # the saves to name: this rank was their coordinator
        self._named: set[int] = set()  # those that were named and are still under way on this rank

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
            self.remove(number)

    def remove(self, number: int) -> None:
        """Remove what this rank has written for a save that the coordinator has named, as soon as that is over here."""
        with self._lock:
            writer = self._writers.pop(number, None)
            self._certain = [one for one in self._certain if one != number]
            if writer is None:
                self._named.add(number)
                return
            self._named.discard(number)
        try:
            writer.remove_unpublished()
        except CheckpointError as error:  # the other ranks go on with the next save
            logger.warning("Files of a failed save could not be removed: %s", error)
