"""The kernels of `derived` in numpy, used where `_derived.c`, which is several times as fast, is not compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import U8, checksum

_U16 = npt.NDArray[np.uint16]


def split_rows(rows: U8, base: U8, low: U8, high: U8, most: int) -> tuple[int, int, int]:
    """Split float32 into lower halves, and those upper halves that are not as expected.

    Args:
        rows: the floats, a matrix of bytes.
        base: the bfloat16 that they were rounded to, a matrix of as many rows.
        low: receives the lower halves.
        high: as long; receives the exceptions, their positions first, or all upper halves if there are more than
            `most`.
        most: at most a third of the floats.

    Returns:
        The number of exceptions, or -1; the CRC of the floats, and that of the base.
    """
    floats = np.ascontiguousarray(rows).reshape(-1)
    rounded = base.copy().reshape(-1)  # which training may change meanwhile
    halves = floats.view(np.uint16).reshape(-1, 2)
    lower, upper = low.view(np.uint16), halves[:, 1]
    np.copyto(lower, halves[:, 0])
    positions = np.flatnonzero(_expected(rounded, lower) != upper)
    if positions.size > most:
        np.copyto(high.view(np.uint16), upper)
        return -1, checksum(floats), checksum(rounded)
    nbytes = positions.size * 4
    high[:nbytes].view(np.uint32)[:] = positions
    high[nbytes : positions.size * 6].view(np.uint16)[:] = upper[positions]
    return positions.size, checksum(floats), checksum(rounded)


def merge_rows(low: U8, exceptions: U8, base: U8, rows: U8) -> int | None:
    """Put float32 together again, and return their CRC; None if an exception is not among them."""
    lower, count = low.view(np.uint16), exceptions.size // 6
    positions = exceptions[: count * 4].view(np.uint32)
    if count and int(positions.max()) >= lower.size:
        return None
    upper = _expected(base, lower)
    upper[positions] = exceptions[count * 4 :].view(np.uint16)
    floats = np.stack([lower, upper], axis=1).view(np.uint8)
    np.copyto(rows, floats.reshape(rows.shape))
    return checksum(floats.reshape(-1))


def _expected(base: U8, low: _U16) -> _U16:
    """Return the upper halves of floats that were rounded to `base`, as if ties were always rounded up."""
    found: _U16 = base.view(np.uint16) - (low >> 15)
    return found
