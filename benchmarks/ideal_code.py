"""How small float32 tensors get if their exponents, predicted or not, are coded by an ideal code.

The bound that the sizes of `benchmarks rowcol` are held against. It is generous: what a real code adds is left out.

- Each block of 1 MiB has its own code, which costs nothing, and takes the entropy of its symbols: parts of bits.
- A symbol is the exponent, or, if that comes to less, the exponent and three bits of the mantissa beside what the
  float's row and column predict. The vectors cost the entropy of their values, in eighths of an octave.
- Zeros cost nothing, wherever they are. Signs cost nothing where all are the same. All other bits are as they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dcp_nvcomp.codecs.choose import columns_of

__all__ = ["ideal_nbytes"]

_BLOCK_FLOATS = 1 << 18
_EXPONENT_SHIFT, _SYMBOL_SHIFT = 23, 20


def ideal_nbytes(tensor: Tensor) -> float:
    """Return the bound for a contiguous float32 tensor.

    Examples:
        >>> import torch
        >>> ideal_nbytes(torch.zeros(64, 64)), ideal_nbytes(torch.ones(8))
        (0.0, 23.0)
    """
    columns = columns_of(tensor.shape)
    matrix = tensor.detach().numpy().view(np.int32).reshape(-1, columns or tensor.numel())
    rows = max(1, _BLOCK_FLOATS // matrix.shape[1])
    blocks = [matrix[at : at + rows] for at in range(0, len(matrix), rows)]
    return sum(_block_bits(block, predict=bool(columns)) for block in blocks) / 8


def _block_bits(block: npt.NDArray[np.int32], *, predict: bool) -> float:
    magnitudes = block.astype(np.int64) & 0x7FFFFFFF
    others = magnitudes != 0
    count = int(others.sum())
    negative = int((block[others] < 0).sum())
    exponents = magnitudes[others] >> _EXPONENT_SHIFT
    bits = [_entropy_bits(exponents) + _EXPONENT_SHIFT * count]
    if predict and count:
        predicted, vectors_bits = _from_rows_and_columns(magnitudes / (1 << _SYMBOL_SHIFT), others)
        symbols = (magnitudes >> _SYMBOL_SHIFT) - predicted
        bits.append(_entropy_bits(symbols[others]) + _SYMBOL_SHIFT * count + vectors_bits)
    return min(bits) + (count if 0 < negative < count else 0)


def _from_rows_and_columns(
    values: npt.NDArray[np.float64], others: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], float]:
    """Return what each float is expected to be, and the cost of the vectors; zeros have no part in the means."""
    row = np.rint(_means(values, others, axis=1))
    column = np.rint(_means(values - row, others, axis=0))
    return (row + column).astype(np.int64), _entropy_bits(row.ravel()) + _entropy_bits(column.ravel())


def _means(values: npt.NDArray[np.float64], others: npt.NDArray[np.bool_], axis: int) -> npt.NDArray[np.float64]:
    total = np.where(others, values, 0).sum(axis=axis, keepdims=True)
    return np.asarray(total / np.maximum(others.sum(axis=axis, keepdims=True), 1))


def _entropy_bits(symbols: npt.NDArray[np.generic]) -> float:
    """Return the cost of all symbols together."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * (np.log2(symbols.size) - np.log2(counts))).sum()) if symbols.size else 0.0
