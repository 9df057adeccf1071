"""`planes`: floats split into an exponent plane, which packs well, and the rest, which is random and stored.

Trained floats are random in the mantissa and skewed in the exponent, so only the exponent's 8 bits are worth an entropy
coder (ZipNN, arXiv:2411.05239, makes the same observation). This module says where the bits go, and takes blocks apart
and together for the CPU engine: with the compiled kernels of `_planes.c`, or, where no C compiler was there when the
package was installed, those of planes_numpy.py. The CUDA engine has kernels of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import FLAG_NEGATIVE, FLAG_PACKED_REST, ArrayToBytes, Plane
from dcp_nvcomp.codecs.scratch import SplitScratch
from dcp_nvcomp.errors import ConfigurationError

try:
    from dcp_nvcomp.codecs.transforms import _planes as kernels
except ImportError:
    from dcp_nvcomp.codecs.transforms import planes_numpy as kernels  # type: ignore[no-redef]

__all__ = ["PLANE_NAMES", "Planes", "merge", "split"]

PLANE_NAMES = ("low", "rest", "exponent")

U8 = npt.NDArray[np.uint8]

# What the kernels say of the signs that they saw, where all are equal.
_FLAGS_OF_SIGNS = {1: FLAG_PACKED_REST, 2: FLAG_PACKED_REST | FLAG_NEGATIVE}


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


def split(block: U8, codec: Planes, outputs: dict[str, U8], *, pack: bool) -> tuple[int, U8]:
    """Split one block into its planes.

    Args:
        block: the block's bytes, contiguous, a whole number of floats.
        codec: the planes.
        outputs: where each of `low`, `rest` and `exponent` goes, uint8 arrays of the sizes of an unpacked layout.
        pack: whether `rest` may be packed to seven bits where all signs are equal.

    Returns:
        The block's flags, and the part of `outputs["rest"]` that was filled (shorter than it where packed).
    """
    rest = outputs["rest"]
    signs = kernels.split_floats(block, codec.float_nbytes, outputs.get("low"), rest, outputs["exponent"])
    if not pack or rest.size < 8 or signs not in _FLAGS_OF_SIGNS:
        return 0, rest
    kernels.pack_rest(rest)
    return _FLAGS_OF_SIGNS[signs], rest[: rest.size - rest.size // 8]


def merge(planes: dict[str, U8], flags: int, codec: Planes, block: U8, scratch: SplitScratch) -> None:
    """Put the planes of one block together again: the inverse of `split`.

    Args:
        planes: the decoded planes by name; `rest` packed where `flags` say so.
        flags: the block's flags.
        codec: the planes.
        block: receives the block's bytes, contiguous.
        scratch: reused between calls.
    """
    rest = planes["rest"]
    if flags & FLAG_PACKED_REST:
        unpacked = scratch.array("rest", block.size // codec.float_nbytes, np.uint8)
        kernels.unpack_rest(rest, unpacked, bool(flags & FLAG_NEGATIVE))
        rest = unpacked
    kernels.merge_floats(block, codec.float_nbytes, planes.get("low"), rest, planes["exponent"])
