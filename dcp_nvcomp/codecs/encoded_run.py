"""Encoded blocks in columns: what a GPU makes of a batch of hundreds, without a Python object for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import BlockRow, EncodedBlock

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class EncodedRun(Sequence[EncodedBlock]):
    """Encoded blocks that lie one after the other; as a sequence, it makes the block that it is asked for.

    Examples:
        >>> import numpy as np
        >>> one, zeros = np.array([8]), np.zeros(1, np.uint32)
        >>> run = EncodedRun(memoryview(bytes(16)), np.array([0, 16]), zeros, zeros, zeros, one, one, np.array([0, 1]))
        >>> len(run), run[0].row.slice_nbytes, run.uncompressed_nbytes
        (1, (8,), 8)
    """

    data: memoryview  # of all of them
    bounds: I64  # of each block, where it begins in `data`, and the end of the last
    flags: U32
    encoded_crcs: U32
    crcs: U32  # of the decoded blocks
    nbytes: I64  # of the decoded blocks
    slice_nbytes: I64  # of each slice of each block, its encoded size
    slice_bounds: I64  # of each block, its first slice, and the number of all

    @cached_property
    def encoded_nbytes(self) -> I64:
        """The size of each encoded block."""
        return self.bounds[1:] - self.bounds[:-1]  # of a few hundred in a sixth of `np.diff`'s time

    @property
    def uncompressed_nbytes(self) -> int:
        return int(self.nbytes.sum())

    def __len__(self) -> int:
        return self.flags.size

    @overload
    def __getitem__(self, which: int) -> EncodedBlock: ...
    @overload
    def __getitem__(self, which: slice) -> EncodedRun: ...

    def __getitem__(self, which: int | slice) -> EncodedBlock | EncodedRun:
        if isinstance(which, slice):
            return self._part(which)
        at = range(len(self))[which]
        start, stop = self.bounds[at : at + 2].tolist()
        first, last = self.slice_bounds[at : at + 2].tolist()
        sizes = tuple(self.slice_nbytes[first:last].tolist())
        row = BlockRow(int(self.flags[at]), sizes, int(self.encoded_crcs[at]), int(self.crcs[at]))
        return EncodedBlock(self.data[start:stop], row, int(self.nbytes[at]))

    def _part(self, which: slice) -> EncodedRun:
        first, stop, step = which.indices(len(self))
        assert step == 1
        stop = max(first, stop)
        bounds, slices = self.bounds[first : stop + 1], self.slice_bounds[first : stop + 1]
        return EncodedRun(
            self.data[int(bounds[0]) : int(bounds[-1])],
            bounds - bounds[0],
            self.flags[first:stop],
            self.encoded_crcs[first:stop],
            self.crcs[first:stop],
            self.nbytes[first:stop],
            self.slice_nbytes[int(slices[0]) : int(slices[-1])],
            slices - slices[0],
        )


def encoded_nbytes(blocks: Sequence[EncodedBlock]) -> int:
    """Return how much was made of it."""
    return len(blocks.data) if isinstance(blocks, EncodedRun) else sum(len(block.data) for block in blocks)


def uncompressed_nbytes(blocks: Sequence[EncodedBlock]) -> int:
    """Return how much was encoded."""
    if isinstance(blocks, EncodedRun):
        return blocks.uncompressed_nbytes
    return sum(block.uncompressed_nbytes for block in blocks)


def recoded(blocks: Sequence[EncodedBlock]) -> int:
    """Return how many blocks the CPU engine encoded again, because a GPU was wrong."""
    return 0 if isinstance(blocks, EncodedRun) else sum(block.was_wrong for block in blocks)
