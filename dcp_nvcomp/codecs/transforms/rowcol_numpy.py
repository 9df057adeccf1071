"""The kernels of rowcol.py in numpy, used if `_rowcol.c`, which is several times as fast, is not compiled.

Both make the same bytes, so that it can be told which blocks differ between two saves whoever wrote them: whether
prediction pays is decided in integers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

PREDICTED = 4
NARROW_ROWS = 8
ESCAPES_SHIFT = 8
MAX_COLUMNS = 1 << 20

_SAME_SIGN, _NEGATIVE = 1, 2
_FLAGS_OF_SEEN = {1: _SAME_SIGN, 2: _SAME_SIGN | _NEGATIVE}
_MIDDLE, _SYMBOLS, _VALUES = 64, 128, 2048
_MAX_ROWS = 0xFFFF  # of a block that is predicted
_MOST_FLOATS = 1 << 24  # of a block that is predicted: so flags have room for the number of escapes
_JUDGED = 1024  # floats of a block by which it is judged whether prediction pays
_LOG_SCALE = 256
_WORTHWHILE = 16  # what it has to gain for each float, in bits of that scale


def predicted_nbytes(count: int, columns: int, flags: int) -> int:
    """Return the length of the plane `rest` of a predicted block of `count` floats."""
    signs = 0 if flags & _SAME_SIGN else (count + 7) // 8
    return _rows_nbytes(-(-count // columns), flags) + columns + 2 * (flags >> ESCAPES_SHIFT) + signs + (count + 1) // 2


def predict_planes(rest: U8, exponent: U8, columns: int, seen: int) -> int:
    """Predict the values of a block that was split, in place.

    Args:
        rest: its plane; begins with the predicted one afterwards, of `predicted_nbytes`.
        exponent: its plane, as long; holds symbols afterwards.
        columns: floats in a row.
        seen: which signs there are, 1 for positive, 2 for negative, 3 for both.

    Returns:
        The block's flags, or 0 if prediction does not pay and nothing was done.
    """
    count = exponent.size
    if rest.size != count or not 0 < columns <= MAX_COLUMNS:
        raise ValueError("The planes are not those of this block.")
    flags, rows = PREDICTED | _FLAGS_OF_SEEN.get(seen, 0), -(-count // columns)
    if (
        count < 2 * columns
        or rows > _MAX_ROWS
        or count > _MOST_FLOATS
        or predicted_nbytes(count, columns, flags) > count
    ):
        return 0
    values = _values(rest, exponent)
    row, column = _vectors(values, columns)
    wide = values - (np.repeat(row, columns)[:count] + np.resize(column, count)) + _MIDDLE
    least = int(row.min())
    if rows > 2 and int(row.max()) - least <= 0xFF:
        flags |= NARROW_ROWS
    symbols = np.where((wide > 0) & (wide < _SYMBOLS), wide, 0).astype(np.uint8)
    escaped = values[symbols == 0].astype("<u2")
    nbytes = predicted_nbytes(count, columns, flags) + escaped.nbytes
    if nbytes > count or not _pays(exponent, symbols, _rows_nbytes(rows, flags) + columns + escaped.nbytes):
        return 0
    kept = [np.array([least]), (row - least).astype(np.uint8)] if flags & NARROW_ROWS else [row]
    parts = [kept[0].astype("<u2").view(np.uint8), *kept[1:]]
    parts += [column.astype(np.int8).view(np.uint8), escaped.view(np.uint8)]
    if not flags & _SAME_SIGN:
        eighths = np.zeros((8, (count + 7) // 8), np.uint8)
        eighths.reshape(-1)[:count] = rest >> 7
        parts.append(np.bitwise_or.reduce(eighths << np.arange(8, dtype=np.uint8)[:, None], axis=0))
    halves = np.zeros((2, (count + 1) // 2), np.uint8)
    halves.reshape(-1)[:count] = rest & 15
    parts.append(halves[0] | halves[1] << 4)
    np.concatenate(parts, out=rest[:nbytes])
    exponent[:] = symbols
    return flags | int(escaped.size) << ESCAPES_SHIFT


def restore_planes(packed: U8, symbols: U8, rest: U8, exponent: U8, columns: int, flags: int) -> bool:
    """Make the planes of a block again from its predicted ones, which can be anything.

    Returns:
        False if there are not as many symbols of zero as the flags say.
    """
    count = symbols.size
    if rest.size != count or exponent.size != count or not 0 < columns <= MAX_COLUMNS:
        raise ValueError("The planes are not those of this block.")
    if packed.size != predicted_nbytes(count, columns, flags):
        raise ValueError("The planes are not those of this block.")
    rows, escapes = -(-count // columns), flags >> ESCAPES_SHIFT
    signs = 0 if flags & _SAME_SIGN else (count + 7) // 8
    lengths = [_rows_nbytes(rows, flags), columns, 2 * escapes, signs]
    row, column, escaped, signed, nibbles = np.split(packed, np.cumsum(lengths))
    zeros = symbols == 0
    if np.count_nonzero(zeros) != escapes:
        return False
    of_rows = _u16(row[:2]) + row[2:] if flags & NARROW_ROWS else _u16(row)
    predicted = np.repeat(of_rows, columns)[:count] + np.resize(column.view(np.int8).astype(np.int64), count)
    values = (symbols.astype(np.int64) - _MIDDLE + predicted) % _VALUES
    values[zeros] = _u16(escaped) % _VALUES
    rest[:] = np.concatenate([nibbles & 15, nibbles >> 4])[:count]
    rest |= ((values & 7) << 4).astype(np.uint8)
    if signs:
        rest |= (signed >> np.arange(8, dtype=np.uint8)[:, None]).reshape(-1)[:count] << 7
    elif flags & _NEGATIVE:
        rest |= 0x80
    exponent[:] = values >> 3
    return True


def _rows_nbytes(rows: int, flags: int) -> int:
    return 2 + rows if flags & NARROW_ROWS else 2 * rows


def _values(rest: U8, exponent: U8) -> I64:
    return exponent.astype(np.int64) << 3 | (rest >> 4 & 7)


def _u16(raw: U8) -> I64:
    return raw[0::2].astype(np.int64) | raw[1::2].astype(np.int64) << 8


def _vectors(values: I64, columns: int) -> tuple[I64, I64]:
    """Return what rows and columns predict: rows their mean, columns what their mean is beside that."""
    whole = values.size // columns
    matrix, last = values[: whole * columns].reshape(whole, columns), values[whole * columns :]
    row = (2 * matrix.sum(axis=1) + columns) // (2 * columns)
    column = (2 * (matrix.sum(axis=0) - row.sum()) + whole) // (2 * whole)
    if last.size:
        row = np.append(row, (2 * last.sum() + last.size) // (2 * last.size))
    return row, np.clip(column, -128, 127)


def _weighted_logs(counts: I64) -> int:
    """Return the sum of count * log2(count), the logarithm in pieces of straight lines."""
    counts = counts[counts > 0].astype(np.int64)
    top = np.frexp(counts)[1].astype(np.int64) - 1
    return int((counts * (top * _LOG_SCALE + (counts * _LOG_SCALE >> top) - _LOG_SCALE)).sum())


def _pays(exponent: U8, symbols: U8, added_nbytes: int) -> bool:
    """Return True if the entropy of symbols is so much lower than that of exponents, which are three bits shorter."""
    step = exponent.size // _JUDGED | 1
    judged = exponent[::step].size
    gain = _weighted_logs(np.bincount(symbols[::step])) - _weighted_logs(np.bincount(exponent[::step]))
    added = 8 * _LOG_SCALE * added_nbytes * judged // exponent.size
    return gain + (3 * _LOG_SCALE - _WORTHWHILE) * judged > added
