"""Array -> bytes codecs: which planes a block has.

`bytes`     the elements as they are, in one plane: what `codec="none"` stores, and what plain coders code
`planes`    floats split into an exponent plane, which packs well, and the rest, which is random and stored
`rowcol`    these, the upper bits predicted from rows and columns: rowcol.py
`derived`   what the rounded copies of floats, stored beside them, lack: derived.py

Trained floats are random in the mantissa and skewed in the exponent, so only the exponent's 8 bits are worth an entropy
coder (ZipNN, arXiv:2411.05239, makes the same observation). Blocks are split and merged on the CPU by the compiled
kernels of `_planes.c` or, if the package was installed without a C compiler, by those of planes_numpy.py. The CUDA
engine has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, ClassVar

import numpy as np

from dcp_nvcomp.codecs.base import (
    FLAG_NEGATIVE,
    FLAG_PACKED_REST,
    U8,
    ArrayToBytes,
    ElementType,
    Plane,
    ScratchArrays,
    integer,
)
from dcp_nvcomp.errors import ConfigurationError, FormatError

try:
    from dcp_nvcomp.codecs.transforms import _planes as kernels
except ImportError:
    from dcp_nvcomp.codecs.transforms import planes_numpy as kernels  # type: ignore[no-redef]

PLANE_NAMES = ("low", "rest", "exponent")

# The flags for the signs that the kernels saw, if all are equal.
_FLAGS_OF_SIGNS = {1: FLAG_PACKED_REST, 2: FLAG_PACKED_REST | FLAG_NEGATIVE}


@dataclass(frozen=True)
class Planes(ArrayToBytes):
    """Planes of floats of `float_nbytes` bytes (2, 4 or 8); those named in `coded` go through the coder.

    Examples:
        >>> [plane.name for plane in Planes(4).layout(nbytes=4096, flags=0, has_coder=True)]
        ['low', 'rest', 'exponent']
    """

    name: ClassVar[str] = "planes"
    float_nbytes: int
    coded: tuple[str, ...] = ("exponent",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "coded", tuple(self.coded))  # a list can't be hashed
        if self.float_nbytes not in (2, 4, 8) or not set(self.coded) <= set(PLANE_NAMES):
            raise ConfigurationError(
                f"Planes(float_nbytes={self.float_nbytes!r}, coded={self.coded!r}): float_nbytes must be 2, 4 or 8, "
                f"and coded some of {', '.join(PLANE_NAMES)}."
            )

    def configuration(self) -> dict[str, Any]:
        return {"float_nbytes": self.float_nbytes, "coded": list(self.coded)}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Planes:
        width, coded = integer(configuration, "float_nbytes", cls.name), configuration.get("coded")
        if width not in (2, 4, 8):
            raise FormatError(f"Codec 'planes' has float_nbytes={shown(width)}; it must be 2, 4 or 8.")
        names = cls(width).plane_names
        if not isinstance(coded, list) or not all(isinstance(name, str) and name in PLANE_NAMES for name in coded):
            raise FormatError(f"Codec 'planes' has coded={shown(coded)}; it must list some of {', '.join(names)}.")
        return cls(width, tuple(name for name in names if name in coded))

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        count = nbytes // self.float_nbytes
        rest = count - count // 8 if flags & FLAG_PACKED_REST else count
        sizes = {"low": count * (self.float_nbytes - 2), "rest": rest, "exponent": count}
        return tuple(Plane(name, sizes[name], name in self.coded) for name in self.plane_names)

    @property
    def plane_names(self) -> tuple[str, ...]:
        """Names of the planes in stored order: two-byte floats have no `low`."""
        return PLANE_NAMES if self.float_nbytes > 2 else PLANE_NAMES[1:]

    def check_flags(self, flags: int) -> bool:
        return flags == 0 or (
            flags in (FLAG_PACKED_REST, FLAG_PACKED_REST | FLAG_NEGATIVE) and "rest" not in self.coded
        )

    def fits(self, element: ElementType) -> bool:
        return self.float_nbytes == element.float_nbytes

    def split(self, block: U8, planes: Sequence[U8]) -> int:
        *low, rest, exponent = planes
        signs = kernels.split_floats(block, self.float_nbytes, low[0] if low else None, rest, exponent)
        return 0 if "rest" in self.coded else pack_signs(rest, signs)

    def merge(self, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        *low, rest, exponent = planes
        if flags & FLAG_PACKED_REST:
            unpacked = scratch.array("rest", exponent.size, np.uint8)
            kernels.unpack_rest(rest, unpacked, bool(flags & FLAG_NEGATIVE))
            rest = unpacked
        kernels.merge_floats(block, self.float_nbytes, low[0] if low else None, rest, exponent)


def pack_signs(rest: U8, signs: int) -> int:
    """Pack a plane in place if all signs that the kernels saw are equal, and return the block's flags."""
    if rest.size < 8 or signs not in _FLAGS_OF_SIGNS:
        return 0
    kernels.pack_rest(rest)
    return _FLAGS_OF_SIGNS[signs]


@dataclass(frozen=True)
class Bytes(ArrayToBytes):
    """One plane, `data`; coded if a coder follows."""

    name: ClassVar[str] = "bytes"
    is_plain: ClassVar[bool] = True

    def configuration(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Bytes:
        return cls()

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        return (Plane("data", nbytes, has_coder),)

    def check_flags(self, flags: int) -> bool:
        return flags == 0

    def split(self, block: U8, planes: Sequence[U8]) -> int:
        np.copyto(planes[0], block)
        return 0

    def merge(self, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        np.copyto(block, planes[0])
