"""`derived`: floats as what their rounded copies lack, as master weights are of the weights of a mixed-precision model.

    float32 master = upper half + lower half;  upper half = bfloat16 weight - (1 if the lower half rounded it up)

So a master is stored as its lower half, beside a weight that is stored as usual: half of four bytes, where planes of
its own take seven eighths. The weight stays readable alone, as most who open a checkpoint read weights only; the other
way round, with weights derived from masters, would take as many bytes, and those who read weights would read masters.

The one case that rounding leaves open, a tie, goes into a list of exceptions, of position and upper half; so does
whatever else is not a rounded master, NaNs for instance. A block with too many of them is stored as it is.

Blocks are split and merged by the compiled kernels of `_derived.c`, which sum them on the way, or by those of
derived_numpy.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import U8, ArrayToBytes, CodecChain, ElementType, Plane, ScratchArrays, Split
from dcp_nvcomp.errors import CorruptDataError

try:
    from dcp_nvcomp.codecs.transforms import _derived as kernels
except ImportError:  # not compiled, or not for this processor
    from dcp_nvcomp.codecs.transforms import derived_numpy as kernels  # type: ignore[no-redef]

DERIVED_FLAG: Final = 4
_EXCEPTIONS_SHIFT: Final = 8
_EXCEPTION_NBYTES: Final = 6  # a position and an upper half
_FEWEST: Final = 32  # floats for each exception: more of these gain little
_MOST_FLOATS: Final = 1 << 24  # of a block, whose exceptions the flags have room for

BASE_DTYPE: Final = "bfloat16"


@dataclass(frozen=True)
class Derived(ArrayToBytes):
    """float32 as what `bfloat16` of another record of the file lacks. A writer uses it where `derived=` says so.

    Examples:
        >>> import numpy as np
        >>> master = np.array([1.0, 1.01, -3.14], np.float32)
        >>> weight = np.array([0x3F80, 0x3F81, 0xC049], np.uint16)  # the same in bfloat16
        >>> base, rows = weight.view(np.uint8)[np.newaxis], master.view(np.uint8)[np.newaxis]
        >>> split = Derived().split_from(base, rows, [np.empty(6, np.uint8), np.empty(6, np.uint8)])
        >>> split.flags  # derived, without exceptions
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
        assert not self.needs_base(flags)
        halves = _halves(block)
        for plane, half in zip(planes, (halves[:, 0], halves[:, 1]), strict=True):
            np.copyto(half, plane.view(np.uint16))

    def split_from(self, base: U8, rows: U8, planes: Sequence[U8]) -> Split:
        low, high = planes
        count = rows.size // 4
        most = count // _FEWEST if count < _MOST_FLOATS else 0
        if len(base) != len(rows):  # one of them is contiguous, and so one row
            base, rows = (one.reshape(max(len(base), len(rows)), -1) for one in (base, rows))
        exceptions, crc, base_crc = kernels.split_rows(rows, base, low, high, most)
        return Split(DERIVED_FLAG | exceptions << _EXCEPTIONS_SHIFT if exceptions >= 0 else 0, crc, base_crc)

    def merge_from(self, base: U8, planes: Sequence[U8], flags: int, rows: U8) -> int:
        low, exceptions = planes
        crc = kernels.merge_rows(low, exceptions, base, rows) if exceptions.size <= low.size else None
        if crc is None:
            raise CorruptDataError("A block has exceptions that are not in it.")
        return crc


DERIVED: Final = CodecChain(Derived())


def is_rounded(base: U8, floats: U8) -> bool:
    """Return True if almost all of some float32 were rounded to what `base` has."""
    planes = [np.empty_like(base), np.empty_like(base)]
    return Derived().split_from(base[np.newaxis], floats[np.newaxis], planes).flags != 0


def _halves(block: U8) -> npt.NDArray[np.uint16]:
    """Return the lower and the upper half of each float."""
    return block.view(np.uint16).reshape(-1, 2)
