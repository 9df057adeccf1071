"""Shared by the uploads of all object stores: what is written is collected into parts, each sent when it is full."""

from __future__ import annotations

import io
import logging
from abc import abstractmethod
from collections.abc import Callable

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.storage.base import OutputStream

logger = logging.getLogger(__name__)


class PartedOutput(OutputStream):
    """A new object that is sent in parts."""

    def __init__(self, where: str, part_nbytes: int, *, replaces: bool = False) -> None:
        self._where, self._part_nbytes, self._replaces = where, part_nbytes, replaces
        self._part = io.BytesIO()
        self._state = "open"  # then "broken", "closed" or "aborted"
        self._may_exist = False  # whether there may be an object of ours

    @abstractmethod
    def _send_part(self) -> None:
        """Send what was collected, taken with `_take_part`."""

    @abstractmethod
    def _finish(self) -> None:
        """Send the rest, and make the object visible."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove what was sent. Never raises."""

    def write(self, data: memoryview | bytes) -> None:
        assert self._state == "open"
        view = memoryview(data).cast("B")
        self._state = "broken"
        while view:
            taken = view[: self._part_nbytes - self._part.tell()]
            self._part.write(taken)
            view = view[len(taken) :]
            if self._part.tell() == self._part_nbytes:
                self._send_part()
        self._state = "open"

    def _take_part(self) -> bytes:
        body = self._part.getvalue()  # shares the memory of what was collected
        self._part = io.BytesIO()
        return body

    def close(self) -> None:
        assert self._state == "open"
        self._state = "broken"
        self._finish()
        self._part = io.BytesIO()
        self._state = "closed"

    def abort(self) -> None:
        if self._state in ("closed", "aborted"):
            return
        self._state = "aborted"
        self._part = io.BytesIO()
        self._discard()

    def _clean_up(self, step: Callable[[], None]) -> None:
        try:
            step()
        except CheckpointError as error:
            logger.warning("Something of the unfinished %s may be left: %s", self._where, error)
