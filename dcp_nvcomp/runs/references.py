"""Which steps a save of an incremental run may refer to: those that were saved or restored right before it.

A save begins before the one before it is published, but after the one before that is over. So there are two, of which
it takes the newest that is there, and neither is removed meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dcp_nvcomp.runs.retention import SavedStep

_MOST: Final = 2


class References:
    """The steps that saves may refer to, the newest first; the same on all ranks."""

    def __init__(self, newest: SavedStep | None) -> None:
        self._steps: deque[int] = deque(maxlen=_MOST)
        self.go_on_from(None if newest is None else newest.step)

    def go_on_from(self, step: int | None) -> None:
        """Refer to the step that was restored, if any."""
        self._steps.clear()
        if step is not None:
            self._steps.append(step)

    def of(self, step: int) -> tuple[int, ...]:
        """Return the steps that the save of a step may refer to; those after it may refer to it."""
        found = tuple(one for one in self._steps if one != step)
        self._steps.appendleft(step)
        return found
