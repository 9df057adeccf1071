"""Replaces a small object so that no request of ours can undo what another save publishes later.

A request that got no answer may still be carried out, after another save has published and removed our files: it would
bring back metadata that names nothing. So each says what it replaces, is sent once at a time, and before it is sent
again we look whether it was carried out.
"""

from __future__ import annotations

import errno
import random
import time
from typing import Final, Protocol

from dcp_nvcomp.errors import ConcurrentSaveError, StorageError
from dcp_nvcomp.storage.base import already_published

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0


class Target(Protocol):
    """One small object on a store that knows conditional writes."""

    @property
    def where(self) -> str:
        """Its URL, for messages."""

    @property
    def deadline_seconds(self) -> float:
        """How long publishing may take."""

    def version(self) -> str | None:
        """Return what the store calls the object's present version; None if there is no object."""

    def read(self) -> bytes | None:
        """Return the object's bytes; None if there is no object."""

    def send(self, data: bytes, before: str | None) -> None:
        """Write it once, if `before` is its present version."""


def replace(target: Target, data: bytes, *, overwrite: bool) -> None:
    """Put `data` there."""
    end = time.monotonic() + target.deadline_seconds
    before = target.version() if overwrite else None
    unsure, pause = False, FIRST_PAUSE_SECONDS  # unsure: whether an attempt had no answer
    while True:
        try:
            target.send(data, before)
            return
        except StorageError as error:
            if error.errno == errno.EEXIST:
                if _is_ours(target, data):
                    return
                present = target.version()
                if present == before:  # refused for another reason, which does not pass: a lease, a policy
                    error.outcome_unknown = unsure
                    raise
                if not overwrite:
                    raise already_published(target.where) from error
                if unsure:
                    raise _refusal(target.where) from error
                before = present  # another save was faster; this one comes after it
            elif error.outcome_unknown:
                unsure, pause = True, min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                raise
            if time.monotonic() + pause >= end:
                raise
            time.sleep(pause * random.uniform(0.25, 0.5))  # so that ranks do not come back all at once


def _is_ours(target: Target, data: bytes) -> bool:
    return any(target.read() == data for _ in range(2))  # twice, as bits may flip in transit


def _refusal(where: str) -> ConcurrentSaveError:
    refusal = ConcurrentSaveError("Another save has published here at the same time.", path=where)
    refusal.outcome_unknown = True
    return refusal
