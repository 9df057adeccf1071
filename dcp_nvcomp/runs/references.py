"""Which steps a save of an incremental run may refer to: those that were saved or restored right before it.

A save begins before the one before it is published, but after the one before that is over. So there are two, of which
it takes the newest that is there, and neither is removed meanwhile. A step that is saved again is another one until it
is published, so the next save does not refer to it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dcp_nvcomp.runs.steps import RunSteps

_MOST: Final = 2


class References:
    """The steps that saves may refer to, the newest first; the same on all ranks."""

    def __init__(self, there: RunSteps) -> None:
        """Refer to the newest of the steps that are there."""
        self._steps: deque[int] = deque(maxlen=_MOST)
        self._again: int | None = None  # saved last, in the place of another
        every = (*there.complete, *there.abandoned, *there.damaged)
        self._highest = max((saved.step for saved in every), default=-1)
        self.go_on_from(max((saved.step for saved in there.complete), default=None))

    def go_on_from(self, step: int | None) -> None:
        """Refer to the step that was restored, if any."""
        self._steps.clear()
        if step is not None:
            self._steps.append(step)

    def of(self, step: int) -> tuple[int, ...]:
        """Return the steps that the save of a step may refer to; those after it may refer to it."""
        found = tuple(one for one in self._steps if one not in (step, self._again))
        self._steps.appendleft(step)
        self._again = step if step <= self._highest else None
        self._highest = max(self._highest, step)
        return found
