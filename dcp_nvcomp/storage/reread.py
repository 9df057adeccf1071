"""Reads that look corrupt are repeated once: a bit flipped in transit goes away, damage on disk does not."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Final, TypeVar

from crc32c import crc32c

from dcp_nvcomp.errors import CorruptDataError, FormatError, MetadataError, UnsafeObjectError, UnsafePathError

T = TypeVar("T")

# Not all that stock DCP writes has a CRC, so a flipped bit can also turn up as a path that leads out of the checkpoint,
# or as a global that is not allowed.
_SIGNS_OF_CORRUPTION: Final = (CorruptDataError, FormatError, MetadataError, UnsafeObjectError, UnsafePathError)


def retry_if_corrupt(work: Callable[[], T], again: Callable[[], T] | None = None) -> T:
    """Read and check something, and once more if it turns out to be corrupt."""
    try:
        return work()
    except _SIGNS_OF_CORRUPTION:
        pass  # free the first read before the second
    return (again or work)()


def reread(read: Callable[[], bytes], check: Callable[[bytes], T]) -> T:
    """Read some bytes and check them, and once more if they turn out to be corrupt and the second read differs."""
    data = read()
    try:
        return check(data)
    except _SIGNS_OF_CORRUPTION as error:
        failure = error
        _let_go(error)
    seen = crc32c(data)
    del data  # there is memory for one of them, not for both
    data = read()
    if crc32c(data) == seen:
        raise failure
    return check(data)


def _let_go(error: BaseException) -> None:
    """Free what the frames of an error's traceback hold: all that was made of the bytes before it was raised."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def is_stored(read: Callable[[], bytes], expected: bytes) -> bool:
    """Return True if one of two reads gives the expected bytes; the second is made only if the first differs."""
    return any(read() == expected for _ in range(2))
