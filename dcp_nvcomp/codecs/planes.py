"""`planes`: floats split into an exponent plane, which packs well, and the rest, which is random and stored.

Trained floats are random in the mantissa and skewed in the exponent, so only the exponent's 8 bits are worth an entropy
coder (ZipNN, arXiv:2411.05239, makes the same observation). This module says where the bits go; the CPU engine does it
with numpy (`split`, `merge` below), the CUDA engine with kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import FLAG_NEGATIVE, FLAG_PACKED_REST, ArrayToBytes, Plane
from dcp_nvcomp.errors import ConfigurationError

__all__ = ["PLANE_NAMES", "Planes", "SplitScratch", "merge", "pack_rest", "split", "unpack_rest"]

PLANE_NAMES = ("low", "rest", "exponent")

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Planes(ArrayToBytes):
    """Planes of floats of `float_nbytes` bytes (2, 4 or 8); those named in `coded` go through the coder.

    Example:
        >>> [plane.name for plane in Planes(4).layout(nbytes=4096, flags=0, has_coder=True)]
        ['low', 'rest', 'exponent']
    """

    name: ClassVar[str] = "planes"
    float_nbytes: int
    coded: tuple[str, ...] = ("exponent",)

    def __post_init__(self) -> None:
        if self.float_nbytes not in (2, 4, 8) or not set(self.coded) <= set(PLANE_NAMES):
            raise ConfigurationError(
                f"Planes(float_nbytes={self.float_nbytes!r}, coded={self.coded!r}): floats must have 2, 4 or 8 bytes, "
                f"and what is coded must be some of {', '.join(PLANE_NAMES)}."
            )

    def configuration(self) -> dict[str, Any]:
        return {"float_nbytes": self.float_nbytes, "coded": list(self.coded)}

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        count = nbytes // self.float_nbytes
        rest = count - count // 8 if flags & FLAG_PACKED_REST else count
        sizes = {"low": count * (self.float_nbytes - 2), "rest": rest, "exponent": count}
        return tuple(Plane(name, sizes[name], name in self.coded) for name in self.plane_names)

    @property
    def plane_names(self) -> tuple[str, ...]:
        """Names of the planes there are, in stored order: two-byte floats have no `low`."""
        return PLANE_NAMES if self.float_nbytes > 2 else PLANE_NAMES[1:]

    def check_flags(self, flags: int) -> bool:
        return flags == 0 or (
            flags in (FLAG_PACKED_REST, FLAG_PACKED_REST | FLAG_NEGATIVE) and "rest" not in self.coded
        )


class SplitScratch:
    """Arrays that `split` and `merge` reuse from block to block; one per thread, grown as needed."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def array(self, name: str, count: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """An uninitialised array of `count` elements that the next call with the same name overwrites."""
        held = self._arrays.get(name)
        if held is None or held.size < count or held.dtype != dtype:
            held = self._arrays[name] = np.empty(count, dtype)
        return held[:count]


def _high_halves(block: U8, float_nbytes: int, scratch: SplitScratch) -> U16:
    """The top 16 bits of each float. For two-byte floats that is the block itself, not a copy."""
    if float_nbytes == 2:
        return block.view(np.uint16)
    high = scratch.array("high", block.size // float_nbytes, np.uint16)
    np.copyto(high, block.view(np.uint16)[float_nbytes // 2 - 1 :: float_nbytes // 2])
    return high


def split(block: U8, codec: Planes, outputs: dict[str, U8], scratch: SplitScratch, *, pack: bool) -> tuple[int, U8]:
    """Split one block into its planes.

    Args:
        block: the block's bytes, contiguous, a whole number of floats.
        codec: the planes.
        outputs: where each of `low`, `rest` and `exponent` goes, uint8 arrays of the sizes of an unpacked layout.
        scratch: reused between calls.
        pack: whether `rest` may be packed to seven bits where all signs are equal.

    Returns:
        The block's flags, and the part of `outputs["rest"]` that was filled (shorter than it where packed).
    """
    width = codec.float_nbytes
    high = _high_halves(block, width, scratch)
    count = high.size
    if width == 4:
        np.copyto(outputs["low"].view(np.uint16), block.view(np.uint32), casting="unsafe")  # truncates: the low halves
    elif width == 8:
        np.copyto(outputs["low"].view(np.uint16).reshape(count, 3), block.view(np.uint16).reshape(count, 4)[:, :3])
    shifted = scratch.array("shifted", count, np.uint16)
    np.right_shift(high, 7, out=shifted)
    np.copyto(outputs["exponent"], shifted, casting="unsafe")
    if pack and count >= 8:
        # one reduction decides both ways for almost every block, as signs are mixed or all positive
        flags = 0
        if int(high.max()) < 0x8000:
            flags = FLAG_PACKED_REST
        elif int(high.min()) >= 0x8000:
            flags = FLAG_PACKED_REST | FLAG_NEGATIVE
        if flags:
            seven = scratch.array("seven", count, np.uint8)
            np.copyto(seven, high, casting="unsafe")
            np.bitwise_and(seven, 0x7F, out=seven)
            packed = outputs["rest"][: count - count // 8]
            pack_rest(seven, packed, scratch)
            return flags, packed
    rest = outputs["rest"]
    np.right_shift(high, 8, out=shifted)
    np.bitwise_and(shifted, 0x80, out=shifted)
    low_seven = scratch.array("low_seven", count, np.uint16)
    np.bitwise_and(high, 0x7F, out=low_seven)
    np.bitwise_or(shifted, low_seven, out=shifted)
    np.copyto(rest, shifted, casting="unsafe")
    return 0, rest


def pack_rest(seven: U8, packed: U8, scratch: SplitScratch) -> None:
    """Pack bytes of seven bits: the last eighth's bits ride on the free top bits of the first seven eighths.

    Whole eighths instead of neighbouring bytes, so that every step is one pass over contiguous bytes.
    """
    eighth = seven.size // 8
    last = seven[7 * eighth : 8 * eighth]
    bit = scratch.array("bit", eighth, np.uint8)
    for k in range(7):
        np.right_shift(last, k, out=bit)
        np.left_shift(bit, 7, out=bit)
        np.bitwise_or(seven[k * eighth : (k + 1) * eighth], bit, out=packed[k * eighth : (k + 1) * eighth])
    packed[7 * eighth :] = seven[8 * eighth :]


def unpack_rest(packed: U8, seven: U8, scratch: SplitScratch) -> None:
    """The inverse of `pack_rest`; `seven` receives bytes below 128."""
    eighth = seven.size // 8
    last = seven[7 * eighth : 8 * eighth]
    last[:] = 0
    bit = scratch.array("bit", eighth, np.uint8)
    for k in range(7):
        part = packed[k * eighth : (k + 1) * eighth]
        np.right_shift(part, 7, out=bit)
        np.left_shift(bit, k, out=bit)
        np.bitwise_or(last, bit, out=last)
        np.bitwise_and(part, 0x7F, out=seven[k * eighth : (k + 1) * eighth])
    np.bitwise_and(packed[7 * eighth :], 0x7F, out=seven[8 * eighth :])


def merge(planes: dict[str, U8], flags: int, codec: Planes, block: U8, scratch: SplitScratch) -> None:
    """Put the planes of one block together again: the inverse of `split`.

    Args:
        planes: the decoded planes by name; `rest` packed where `flags` say so.
        flags: the block's flags.
        codec: the planes.
        block: receives the block's bytes, contiguous.
        scratch: reused between calls.
    """
    width = codec.float_nbytes
    count = block.size // width
    rest = planes["rest"]
    sign = 0
    if flags & FLAG_PACKED_REST:
        seven = scratch.array("seven", count, np.uint8)
        unpack_rest(rest, seven, scratch)
        rest, sign = seven, 0x8000 if flags & FLAG_NEGATIVE else 0
    high: U16 = block.view(np.uint16) if width == 2 else scratch.array("high", count, np.uint16)
    shifted = scratch.array("shifted", count, np.uint16)
    np.copyto(shifted, rest)
    np.copyto(high, planes["exponent"])
    np.left_shift(high, 7, out=high)
    if not flags & FLAG_PACKED_REST:
        sign_bits = scratch.array("low_seven", count, np.uint16)
        np.bitwise_and(shifted, 0x80, out=sign_bits)
        np.left_shift(sign_bits, 8, out=sign_bits)
        np.bitwise_or(high, sign_bits, out=high)
        np.bitwise_and(shifted, 0x7F, out=shifted)
    elif sign:
        np.bitwise_or(high, sign, out=high)
    np.bitwise_or(high, shifted, out=high)
    if width == 4:
        wide = block.view(np.uint32)
        np.copyto(wide, high)
        np.left_shift(wide, 16, out=wide)
        np.bitwise_or(wide, planes["low"].view(np.uint16), out=wide)
    elif width == 8:
        quarters = block.view(np.uint16).reshape(count, 4)
        quarters[:, :3] = planes["low"].view(np.uint16).reshape(count, 3)
        quarters[:, 3] = high
