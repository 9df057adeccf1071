"""The kernels of the planes in numpy, used if `_planes.c`, which is several times as fast, is not compiled.

Whole passes over contiguous arrays, tile by tile, so that the data of a tile stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

_TILE = 1 << 16  # floats
_SEEN_POSITIVE, _SEEN_NEGATIVE = 1, 2


def _tiles(count: int) -> Iterator[slice]:
    for start in range(0, count, _TILE):
        yield slice(start, min(start + _TILE, count))


def _high_halves(block: U8, width: int, tile: slice) -> U16:
    """Return the top 16 bits of a tile's floats. For two-byte floats that is the block itself, not a copy."""
    if width == 2:
        return block.view(np.uint16)[tile]
    if width == 4:
        return (block.view(np.uint32)[tile] >> 16).astype(np.uint16)
    return block.view(np.uint16)[3::4][tile].copy()


def split_floats(block: U8, width: int, low: U8 | None, rest: U8, exponent: U8) -> int:
    _check(block, width, low, rest, exponent)
    seen = 0
    for tile in _tiles(exponent.size):
        high = _high_halves(block, width, tile)
        if width == 4:
            assert low is not None
            # casting truncates: the low halves
            np.copyto(low.view(np.uint16)[tile], block.view(np.uint32)[tile], casting="unsafe")
        elif width == 8:
            assert low is not None
            low.view(np.uint16).reshape(-1, 3)[tile] = block.view(np.uint16).reshape(-1, 4)[tile, :3]
        bits = np.right_shift(high, 7)
        np.copyto(exponent[tile], bits, casting="unsafe")
        np.bitwise_and(high, 0x807F, out=bits)
        np.bitwise_or(bits, np.right_shift(bits, 8), out=bits)
        np.copyto(rest[tile], bits, casting="unsafe")
        seen |= _SEEN_POSITIVE if int(rest[tile].min()) < 0x80 else 0
        seen |= _SEEN_NEGATIVE if int(rest[tile].max()) >= 0x80 else 0
    return seen


def merge_floats(block: U8, width: int, low: U8 | None, rest: U8, exponent: U8) -> None:
    _check(block, width, low, rest, exponent)
    for tile in _tiles(exponent.size):
        high = exponent[tile].astype(np.uint16)
        np.left_shift(high, 7, out=high)
        bits = rest[tile].astype(np.uint16)
        np.multiply(
            bits, 0x0101, out=bits
        )  # the byte twice: its sign belongs into the upper copy, the rest in the lower
        np.bitwise_and(bits, 0x807F, out=bits)
        np.bitwise_or(high, bits, out=high)
        if width == 2:
            block.view(np.uint16)[tile] = high
        elif width == 4:
            assert low is not None
            wide = high.astype(np.uint32)
            np.left_shift(wide, 16, out=wide)
            np.bitwise_or(wide, low.view(np.uint16)[tile], out=block.view(np.uint32)[tile])
        else:
            assert low is not None
            quarters = block.view(np.uint16).reshape(-1, 4)[tile]
            quarters[:, :3] = low.view(np.uint16).reshape(-1, 3)[tile]
            quarters[:, 3] = high


def _check(block: U8, width: int, low: U8 | None, rest: U8, exponent: U8) -> None:
    count = exponent.size
    low_nbytes = 0 if low is None else low.size
    if width not in (2, 4, 8) or (block.size, low_nbytes, rest.size) != (count * width, count * (width - 2), count):
        raise ValueError("The planes are not those of this block.")


def pack_rest(rest: U8) -> None:
    """Pack the low seven bits of n bytes into the first n - n // 8 of them; the rest is undefined afterwards.

    The last eighth's bits ride on the free top bits of the first seven eighths. Whole eighths instead of neighbouring
    bytes, so that every step is one pass over contiguous bytes.
    """
    np.bitwise_and(rest, 0x7F, out=rest)
    eighth = rest.size // 8
    last = rest[7 * eighth : 8 * eighth]
    for k in range(7):
        part = rest[k * eighth : (k + 1) * eighth]
        np.bitwise_or(part, (last >> k) << 7, out=part)
    rest[7 * eighth : rest.size - eighth] = rest[8 * eighth :].copy()


def unpack_rest(packed: U8, rest: U8, is_negative: bool) -> None:
    eighth = rest.size // 8
    if packed.size != rest.size - eighth:
        raise ValueError("The packed plane is not that of this block.")
    last = rest[7 * eighth : 8 * eighth]
    last[:] = 0
    for k in range(7):
        part = packed[k * eighth : (k + 1) * eighth]
        np.bitwise_or(last, (part >> 7) << k, out=last)
        rest[k * eighth : (k + 1) * eighth] = part
    rest[8 * eighth :] = packed[7 * eighth :]
    np.bitwise_and(rest, 0x7F, out=rest)
    if is_negative:
        np.bitwise_or(rest, 0x80, out=rest)
