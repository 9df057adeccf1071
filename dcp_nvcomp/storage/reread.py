"""Reads that look corrupt are repeated once: a bit flipped in transit goes away, damage on disk does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from dcp_nvcomp.errors import CorruptDataError, FormatError, MetadataError, UnsafePathError

__all__ = ["SIGNS_OF_DAMAGE", "twice"]

T = TypeVar("T")

# Stock DCP's metadata has no CRC, so a flipped bit can also turn up as a path that leads out of the checkpoint.
SIGNS_OF_DAMAGE: Final = (CorruptDataError, FormatError, MetadataError, UnsafePathError)


def twice(work: Callable[[], T], again: Callable[[], T] | None = None) -> T:
    """Read and check something, and once more if it turns out to be corrupt.

    Args:
        work: reads and checks; or only checks what was read already.
        again: reads and checks for the second time; `work` by default.

    Returns:
        The result of the first of them that succeeded.

    Raises:
        CheckpointError: the error of the second; or of the first if it is no sign of corruption (`StorageError`).
    """
    try:
        return work()
    except SIGNS_OF_DAMAGE:
        pass  # free the first read before the second
    return (again or work)()
