"""How small float32 tensors get if their exponents, predicted or not, are coded by an ideal code, or a prefix code.

The bounds that the sizes of `benchmarks rowcol` are held against, for blocks and slices as this package cuts them. They
are generous: what a real code adds is left out.

- Each slice has a code of its own, which costs nothing. An ideal one takes the entropy of its symbols: parts of bits. A
  prefix code, as literals of zstd and deflate have it, takes whole ones.
- A symbol is the exponent, or, if that comes to less, the exponent and three bits of the mantissa beside what the
  float's row and column predict. The vectors, of each block, cost what such a code takes for their values.
- Zeros cost nothing, wherever they are. Signs cost nothing where all are the same. All other bits are as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dcp_nvcomp.codecs.choose import columns_of
from dcp_nvcomp.codecs.coders import DEFAULT_SLICE_NBYTES
from dcp_nvcomp.format.block_grid import box_grid

__all__ = ["entropy_bits", "least_nbytes", "prefix_bits"]

Cost = Callable[[npt.NDArray[np.generic]], float]  # of all symbols together, in bits

_EXPONENT_SHIFT, _SYMBOL_SHIFT = 23, 20


def least_nbytes(tensor: Tensor, cost: Cost) -> float:
    """Return the bound for a contiguous float32 tensor whose symbols take `cost`: `entropy_bits` or `prefix_bits`.

    Examples:
        >>> import torch
        >>> least_nbytes(torch.zeros(64, 64), entropy_bits), least_nbytes(torch.ones(8), entropy_bits)
        (0.0, 23.0)
    """
    values = tensor.detach().numpy().view(np.int32)
    grid = box_grid(tuple(tensor.shape), tensor.itemsize)
    blocks = [values[box.index] for box in map(grid.box, range(grid.block_count))]
    return sum(_block_bits(block.reshape(-1, columns_of(block.shape) or block.size), cost) for block in blocks) / 8


def entropy_bits(symbols: npt.NDArray[np.generic]) -> float:
    """Return what an ideal code takes for all symbols together."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * (np.log2(symbols.size) - np.log2(counts))).sum()) if symbols.size else 0.0


def prefix_bits(symbols: npt.NDArray[np.generic]) -> float:
    """Return what the best prefix code takes, Huffman's, with codes of any length; nothing for a single symbol.

    Examples:
        >>> prefix_bits(np.array([1, 1, 1, 2])), prefix_bits(np.array([1, 1, 2, 3])), prefix_bits(np.array([1, 1]))
        (4.0, 6.0, 0.0)
    """
    counts: list[int] = np.unique(symbols, return_counts=True)[1].tolist()
    heapify(counts)
    bits = 0
    while len(counts) > 1:
        both = heappop(counts) + heappop(counts)
        bits += both
        heappush(counts, both)
    return float(bits)


def _block_bits(block: npt.NDArray[np.int32], cost: Cost) -> float:
    magnitudes = block.astype(np.int64) & 0x7FFFFFFF
    others = magnitudes != 0
    count = int(others.sum())
    negative = int((block[others] < 0).sum())
    bits = [_slices_bits(magnitudes >> _EXPONENT_SHIFT, others, cost) + _EXPONENT_SHIFT * count]
    if len(block) > 1 and count:
        row, column = _rows_and_columns(magnitudes / (1 << _SYMBOL_SHIFT), others)
        symbols = (magnitudes >> _SYMBOL_SHIFT) - row - column
        bits.append(_slices_bits(symbols, others, cost) + _SYMBOL_SHIFT * count + cost(row) + cost(column))
    return min(bits) + (count if 0 < negative < count else 0)


def _slices_bits(symbols: npt.NDArray[np.int64], others: npt.NDArray[np.bool_], cost: Cost) -> float:
    symbols, others = symbols.ravel(), others.ravel()
    starts = range(0, symbols.size, DEFAULT_SLICE_NBYTES)
    slices = [slice(start, start + DEFAULT_SLICE_NBYTES) for start in starts]
    return sum(cost(symbols[part][others[part]]) for part in slices)


def _rows_and_columns(
    values: npt.NDArray[np.float64], others: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return what is expected of rows, and of columns beside that; zeros have no part in the means."""
    row = np.rint(_means(values, others, axis=1))
    column = np.rint(_means(values - row, others, axis=0))
    return row.astype(np.int64), column.astype(np.int64)


def _means(values: npt.NDArray[np.float64], others: npt.NDArray[np.bool_], axis: int) -> npt.NDArray[np.float64]:
    total = np.where(others, values, 0).sum(axis=axis, keepdims=True)
    return np.asarray(total / np.maximum(others.sum(axis=axis, keepdims=True), 1))
