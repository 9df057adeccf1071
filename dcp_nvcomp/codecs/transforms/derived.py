"""`derived`: floats as what their rounded copies lack, as master weights are of the weights of a mixed-precision model.

    float32 master = upper half + lower half;  upper half = bfloat16 weight - (1 if the lower half rounded it up)

So a master is stored as its lower half, beside a weight that is stored as usual: half of four bytes, where planes of
its own take seven eighths. The weight stays readable alone, as most who open a checkpoint read weights only; the other
way round, with weights derived from masters, would take as many bytes, and those who read weights would read masters.

The one case that rounding leaves open, a tie, goes into a list of exceptions, of position and upper half; so does
whatever else is not a rounded master, NaNs for instance. A block with too many of them is stored as it is.

Blocks are split by whole operations of numpy, and not in C: they are as fast as storing the rest of the state is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import U8, ArrayToBytes, CodecChain, ElementType, Plane, ScratchArrays
from dcp_nvcomp.errors import CorruptDataError

DERIVED_FLAG: Final = 4
_EXCEPTIONS_SHIFT: Final = 8
_EXCEPTION_NBYTES: Final = 6
_FEWEST: Final = 32  # floats for each exception: more of these gain little
_MOST_FLOATS: Final = 1 << 24  # of a block, whose exceptions the flags have room for

BASE_DTYPE: Final = "bfloat16"

_Halves: TypeAlias = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Derived(ArrayToBytes):
    """float32 as what `bfloat16` of another record of the file lacks. A writer uses it where `derived=` says so.

    Examples:
        >>> import numpy as np
        >>> master = np.array([1.0, 1.01, -3.14], np.float32)
        >>> weight = np.array([0x3F80, 0x3F81, 0xC049], np.uint16)  # the same in bfloat16
        >>> low, high = np.empty(6, np.uint8), np.empty(6, np.uint8)
        >>> Derived().split_from(weight.view(np.uint8), master.view(np.uint8), [low, high], ScratchArrays())
        4
    """

    name: ClassVar[str] = "derived"
    feature: ClassVar[str | None] = "derived"
    has_base: ClassVar[bool] = True

    def configuration(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Derived:
        return cls()

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        half_nbytes = nbytes // 2
        high_nbytes = (flags >> _EXCEPTIONS_SHIFT) * _EXCEPTION_NBYTES if flags else half_nbytes
        return Plane("low", half_nbytes, coded=False), Plane("high", high_nbytes, coded=False)

    def check_flags(self, flags: int) -> bool:
        return flags == 0 or flags & ((1 << _EXCEPTIONS_SHIFT) - 1) == DERIVED_FLAG

    def fits(self, element: ElementType) -> bool:
        return element.name == "float32"

    def needs_base(self, flags: int) -> bool:
        return flags != 0

    def split(self, block: U8, planes: Sequence[U8]) -> int:
        halves = _halves(block)
        for plane, half in zip(planes, (halves[:, 0], halves[:, 1]), strict=True):
            np.copyto(plane.view(np.uint16), half)
        return 0

    def merge(self, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        halves = _halves(block)
        for plane, half in zip(planes, (halves[:, 0], halves[:, 1]), strict=True):
            np.copyto(half, plane.view(np.uint16))

    def split_from(self, base: U8, block: U8, planes: Sequence[U8], scratch: ScratchArrays) -> int:
        low, halves = planes[0].view(np.uint16), _halves(block)
        np.copyto(low, halves[:, 0])
        upper = halves[:, 1]
        expected = _expected(base, low, scratch.array("expected", low.size, np.uint16))
        positions = np.flatnonzero(np.not_equal(expected, upper, out=scratch.array("other", low.size, np.bool_)))
        if positions.size > low.size // _FEWEST or low.size >= _MOST_FLOATS:
            np.copyto(planes[1].view(np.uint16), upper)
            return 0
        nbytes = positions.size * 4
        planes[1][:nbytes].view(np.uint32)[:] = positions
        planes[1][nbytes : positions.size * _EXCEPTION_NBYTES].view(np.uint16)[:] = upper[positions]
        return DERIVED_FLAG | positions.size << _EXCEPTIONS_SHIFT

    def merge_from(self, base: U8, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        low, exceptions = planes[0].view(np.uint16), planes[1]
        nbytes = (flags >> _EXCEPTIONS_SHIFT) * 4
        positions = exceptions[:nbytes].view(np.uint32)
        if exceptions.size > low.nbytes or (positions.size and int(positions.max()) >= low.size):
            raise CorruptDataError("A block has exceptions that are not in it.")
        upper = _expected(base, low, scratch.array("expected", low.size, np.uint16))
        upper[positions] = exceptions[nbytes:].view(np.uint16)
        floats = block.view(np.uint32)  # whole ones, as vector instructions write them
        np.copyto(floats, upper)
        np.left_shift(floats, 16, out=floats)
        np.bitwise_or(floats, low, out=floats)


DERIVED: Final = CodecChain(Derived())


def is_rounded(base: U8, floats: U8) -> bool:
    """Return True if almost all of some float32 were rounded to what `base` has."""
    low, high = _halves(floats).T
    return int(np.count_nonzero(_expected(base, low, np.empty_like(high)) != high)) <= len(high) // _FEWEST


def _halves(block: U8) -> _Halves:
    """Return the lower and the upper half of each float."""
    return block.view(np.uint16).reshape(-1, 2)


def _expected(base: U8, low: _Halves, out: _Halves) -> _Halves:
    """Return the upper halves of floats that were rounded to `base`, as if ties were always rounded up."""
    np.right_shift(low, 15, out=out)
    return np.subtract(base.view(np.uint16), out, out=out)
