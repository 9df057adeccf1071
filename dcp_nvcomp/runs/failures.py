"""Errors of saves that failed behind training, until a call of the manager has raised them on all ranks."""

from __future__ import annotations

import threading

from dcp_nvcomp.errors import RankFailedError


class Failures:
    """What failed and was not raised yet.

    Ranks notice a failure at different times, and must raise it at the same call. So each tells the others the newest
    step that failed on it, and a step that was raised once is not raised again by a rank that notices later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[int, BaseException] = {}
        self._raised = 0
        self._lost: tuple[int, BaseException | None] = 0, None

    def note(self, number: int, error: BaseException) -> None:
        """Remember a failure."""
        with self._lock:
            if number > self._raised:
                self._errors[number] = error

    def note_lost(self, number: int, error: BaseException) -> None:
        """Remember a save that the fast tier lost on its way to the durable one: the next save makes up for it."""
        with self._lock:
            self._lost = max(self._lost[0], number), error

    @property
    def lost(self) -> int:
        """The latest save that the fast tier lost; 0 if there is none."""
        return self._lost[0]

    def raise_lost(self, made_up_for: int) -> None:
        """Raise why a save was lost, if no later one made up for it."""
        number, error = self._lost
        if number > made_up_for and error is not None:
            raise error

    @property
    def newest(self) -> int:
        """The latest save that failed and was not raised; 0 if none did."""
        with self._lock:
            return max(self._errors, default=0)

    def raise_up_to(self, number: int) -> None:
        """Raise what failed, on each rank, once the ranks agreed that a save did."""
        with self._lock:
            if number <= self._raised:
                return
            self._raised = number
            own = [self._errors.pop(one) for one in sorted(self._errors) if one <= number]
        if not own:
            raise RankFailedError("A save behind training failed on another rank, which says why.")
        raise own[-1]
