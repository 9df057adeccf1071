"""Bits flip on the way too: what is damaged in a file is damaged as well when it is read a second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from dcp_nvcomp.errors import CorruptDataError, FormatError, MetadataError, UnsafePathError

__all__ = ["SIGNS_OF_DAMAGE", "twice"]

T = TypeVar("T")

# A flipped bit can also make a name that leads out of the checkpoint: stock DCP's metadata has no CRC to tell.
SIGNS_OF_DAMAGE: Final = (CorruptDataError, FormatError, MetadataError, UnsafePathError)


def twice(work: Callable[[], T], again: Callable[[], T] | None = None) -> T:
    """Read and check something, once more where it turns out to be damaged.

    Args:
        work: reads and checks; or only checks what was read already.
        again: reads and checks anew; by default `work` does.

    Returns:
        What the first of them that worked returned.

    Raises:
        CheckpointError: what the second one raised; or the first, where that is no sign of damage (`StorageError`).
    """
    try:
        return work()
    except SIGNS_OF_DAMAGE:
        pass  # and let go of what was read before more is
    return (again or work)()
