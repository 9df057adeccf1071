"""Bits flip on the way too: what is damaged in a file is damaged as well when it is read a second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dcp_nvcomp.errors import CorruptDataError, FormatError, MetadataError

__all__ = ["twice"]

T = TypeVar("T")


def twice(work: Callable[[], T], again: Callable[[], T] | None = None) -> T:
    """Read and check something, once more where it turns out to be damaged.

    Args:
        work: reads and checks; or only checks what was read already.
        again: reads and checks anew; by default `work` does.

    Returns:
        What the first of them that worked returned.

    Raises:
        CheckpointError: what the second one raised; or the first, where that says nothing of damage (`StorageError`).
    """
    try:
        return work()
    except (CorruptDataError, FormatError, MetadataError):
        return (again or work)()
