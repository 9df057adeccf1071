"""`rowcol`: planes of floats whose upper bits are predicted from their row and their column.

Adam's second moment is nearly a row times a column: each neuron has its scale, and each of its inputs. So what is left
of a float's exponent and the first bits of its mantissa, once the means of its row and its column are taken away, is
small. First moments have it less, gradients too, weights hardly.

A filter of the two planes that `planes` makes, of 8 bits each, and not of floats:

- Eleven bits are predicted, the exponent and three of the mantissa, in eighths of an octave. What is left is coded as
  one byte, of which 127 values cover eight octaves to both sides, as many as the encoder of literals has codes for.
- A row's mean is kept in two bytes, of which a bit pattern can't be too large, or in one where all are within 32
  octaves; what a column has beside that in one, clipped. Finer units (a 128th of an octave was tried) cost more bytes
  for vectors than they save in symbols.
- All below is stored as before. So a reader needs no more memory, `rest` has room for everything that is new, and a
  block for which it does not pay, or that has too many floats far from what is expected, is one of `planes`.
- Escaped floats have no positions, which a file could set anywhere: they are those with the symbol zero.
- The vectors are the block's own: any block is decoded alone, and a load of some columns reads what it did before.
- The number of columns is part of the configuration, as a layout must follow from a length and flags. A block at an
  edge that is narrower wraps: it is right, and gains less.

There are no kernels for GPUs: the CPU engine decodes such blocks everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shown
from typing import Any, ClassVar

import numpy as np

from dcp_nvcomp.codecs.base import U8, ArrayToBytes, ElementType, Plane, ScratchArrays, integer
from dcp_nvcomp.codecs.transforms import Planes, pack_signs
from dcp_nvcomp.codecs.transforms import kernels as planes_kernels
from dcp_nvcomp.codecs.transforms.rowcol_numpy import (
    ESCAPES_SHIFT,
    MAX_COLUMNS,
    NARROW_ROWS,
    PREDICTED,
    predicted_nbytes,
)
from dcp_nvcomp.errors import ConfigurationError, CorruptDataError, FormatError

try:
    from dcp_nvcomp.codecs.transforms import _rowcol as kernels
except ImportError:
    from dcp_nvcomp.codecs.transforms import rowcol_numpy as kernels  # type: ignore[no-redef]

_ELEMENTS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class RowCol(ArrayToBytes):
    """Planes of bfloat16 (`float_nbytes` 2) or float32 (4), predicted from rows of `columns` floats.

    `codec="auto"` uses it where a sample says that it pays. Checkpoints with it need this version or a later one.

    Examples:
        >>> from dcp_nvcomp.codecs import CodecChain, RowCol, Zstd
        >>> chain = CodecChain(RowCol(float_nbytes=4, columns=512), Zstd(literals_only=True))
        >>> chain.label
        'rowcol-zstd'
    """

    name: ClassVar[str] = "rowcol"
    feature: ClassVar[str | None] = "rowcol"
    float_nbytes: int
    columns: int  # in a row of a block, of a whole one

    def __post_init__(self) -> None:
        if self.float_nbytes not in (2, 4) or not _is_columns(self.columns):
            raise ConfigurationError(
                f"RowCol(float_nbytes={self.float_nbytes!r}, columns={self.columns!r}): float_nbytes must be 2 or 4, "
                f"and columns from 1 to {MAX_COLUMNS}."
            )

    def configuration(self) -> dict[str, Any]:
        return {"float_nbytes": self.float_nbytes, "columns": self.columns}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> RowCol:
        width, columns = (integer(configuration, key, cls.name) for key in ("float_nbytes", "columns"))
        if width not in (2, 4):
            raise FormatError(f"Codec 'rowcol' has float_nbytes={shown(width)}; it must be 2 or 4.")
        if not _is_columns(columns):
            raise FormatError(f"Codec 'rowcol' has columns={shown(columns)}; it must be from 1 to {MAX_COLUMNS}.")
        return cls(width, columns)

    @cached_property
    def _planes(self) -> Planes:
        return Planes(self.float_nbytes)

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        if not flags & PREDICTED:
            return self._planes.layout(nbytes, flags, has_coder)
        *low, rest, exponent = self._planes.layout(nbytes, 0, has_coder)
        packed_nbytes = predicted_nbytes(exponent.nbytes, self.columns, flags)
        return (*low, Plane(rest.name, packed_nbytes, coded=False), exponent)

    def check_flags(self, flags: int) -> bool:
        if flags & PREDICTED:
            flags &= ~(PREDICTED | NARROW_ROWS | -1 << ESCAPES_SHIFT)
        return self._planes.check_flags(flags)

    def fits(self, element: ElementType) -> bool:
        return _ELEMENTS.get(element.name) == self.float_nbytes

    @staticmethod
    def predicts(element: ElementType, columns: int) -> bool:
        """Return True if there is a codec of this kind for such elements, in rows of so many."""
        return element.name in _ELEMENTS and _is_columns(columns)

    def split(self, block: U8, planes: Sequence[U8]) -> int:
        *low, rest, exponent = planes
        signs = planes_kernels.split_floats(block, self.float_nbytes, low[0] if low else None, rest, exponent)
        return kernels.predict_planes(rest, exponent, self.columns, signs) or pack_signs(rest, signs)

    def merge(self, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        if not flags & PREDICTED:
            self._planes.merge(planes, flags, block, scratch)
            return
        *low, packed, symbols = planes
        rest, exponent = (scratch.array(name, symbols.size, np.uint8) for name in ("rest", "exponent"))
        if packed.size > symbols.size or not kernels.restore_planes(
            packed, symbols, rest, exponent, self.columns, flags
        ):
            raise CorruptDataError("A block does not have as many escaped floats as its flags say.")
        planes_kernels.merge_floats(block, self.float_nbytes, low[0] if low else None, rest, exponent)


def _is_columns(columns: Any) -> bool:
    return isinstance(columns, int) and not isinstance(columns, bool) and 1 <= columns <= MAX_COLUMNS
