"""Publishes a small object so that no request of ours can undo what another save publishes later.

A request that was never answered may still be carried out: after another save has published and removed our files it
would bring back metadata that names nothing. So every write says which version it replaces, and the store refuses what
comes late. After no answer, we look whether it was carried out before it is sent again. A store that knows no
conditions gets plain writes, repeated only while the object is as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from dcp_nvcomp.errors import CheckpointError, ConcurrentSaveError, StorageError
from dcp_nvcomp.storage.attempts import Attempts
from dcp_nvcomp.storage.base import already_published

UNREADABLE: Final = "?"  # the version of what may not be looked at, which is taken to be unchanged
AS_IT_IS: Final = "{}"  # the form of a version in a condition
_ROUNDS: Final = 20  # of other saves that are faster


class Target(ABC):
    """One object and what its store can do; each request is one attempt."""

    where: str  # its URL, for messages
    # How a version may be written in a condition, to be tried in this order; None, at the end, is without a condition.
    forms: Sequence[str | None] = (AS_IT_IS,)

    @abstractmethod
    async def version(self) -> str | None:
        """Return the object's version; None if there is no object, `UNREADABLE` if it may not be looked at."""

    @abstractmethod
    async def read(self) -> bytes | None:
        """Return the object's bytes; None if there are none to be had."""

    @abstractmethod
    async def write(self, data: bytes, before: str | None, form: str | None) -> None:
        """Write the object if `before` is its version. Without a condition if there is no form to write that in."""

    @abstractmethod
    def is_refusal(self, error: Exception) -> bool:
        """True if a write was refused because of its condition."""

    def knows_no_conditions(self, error: Exception) -> bool:
        """True if a write was refused because the store does not know conditional writes."""
        return False


def publish(attempts: Attempts, target: Target, data: bytes, *, overwrite: bool) -> None:
    """Put `data` there; ConcurrentSaveError if it may not replace, or another save published meanwhile."""
    publication = _Publication(attempts, target, data, overwrite)
    try:
        attempts.perform("write", target.where, publication.attempt)
    except StorageError as error:
        error.outcome_unknown = publication.unsure
        raise


class _Publication:
    def __init__(self, attempts: Attempts, target: Target, data: bytes, overwrite: bool) -> None:
        self._attempts, self._target, self._data, self._overwrite = attempts, target, data, overwrite
        self._forms: list[str | None] = [*target.forms] if overwrite else [AS_IT_IS]
        self._before: str | None = None
        self._looked = not overwrite
        self.unsure = False  # whether a write had no answer

    async def attempt(self) -> None:
        """Try once, for `Attempts.perform`."""
        if not self._looked:
            self._before, self._looked = await self._target.version(), True
        for _ in range(_ROUNDS):
            if self.unsure and await self._target.version() != self._before:
                if await self._is_ours():
                    return
                raise self._conflict()
            refusal = await self._write()
            if refusal is None:
                return
            if self._forms[0] is None:  # conditions are unknown there: without them from here on
                continue
            now = await self._target.version()
            if now == self._before:  # refused though nothing changed: the form is not understood, or a lease forbids it
                self._forms.pop(0)
                if not self._forms:
                    raise refusal
            elif await self._is_ours():
                return
            elif self.unsure or not self._overwrite:
                raise self._conflict()
            else:
                self._before = now  # another save was faster; this one comes after it
        raise self._conflict()

    async def _write(self) -> Exception | None:
        """Return None if it was written, else the refusal of the condition."""
        form, unsure = self._forms[0], self.unsure
        self.unsure = True
        try:
            await self._target.write(self._data, self._before, form)
        except Exception as error:
            self.unsure = unsure or self._attempts.may_be_done(error)
            if form is None or self._before == UNREADABLE:
                raise
            if self._overwrite and self._target.knows_no_conditions(error):
                self._forms = [None]
            elif not self._target.is_refusal(error):
                raise
            return error
        return None

    async def _is_ours(self) -> bool:
        for _ in range(2):  # twice, as bits may flip in transit
            if await self._target.read() == self._data:
                return True
        return False

    def _conflict(self) -> CheckpointError:
        if not self._overwrite:
            return already_published(self._target.where)
        conflict = ConcurrentSaveError("Another save has published here at the same time.", path=self._target.where)
        conflict.outcome_unknown = True
        return conflict
