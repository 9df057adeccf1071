"""What a writer published last: it need not parse its own `.metadata` to learn which files that names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.storage.base import Filesystem


class LastPublished:
    """Size and digest of the `.metadata` that one writer published last, and the files that belong to it.

    The place does not matter: where the same bytes are, the same files belong to them. Whatever differs is read and
    checked like a stranger's.
    """

    def __init__(self) -> None:
        self._known: tuple[int, bytes, frozenset[str]] | None = None  # one value, so that saves may overlap

    def note(self, data: bytes, names: Iterable[str]) -> None:
        """Remember what was published, and the names of all files that belong to it."""
        self._known = len(data), _digest(data), frozenset(names)

    def names_if_current(self, filesystem: Filesystem, nbytes: int) -> set[str] | None:
        """Return the files of the current checkpoint if it is the one that was published last; else None."""
        known = self._known
        if known is None or nbytes != known[0]:
            return None
        data = filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES)
        return set(known[2]) if _digest(data) == known[1] else None


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
