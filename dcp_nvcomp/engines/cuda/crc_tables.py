"""Tables with which the kernels compute CRC32C in parallel: what appending zero bytes does to a CRC register.

A register is a polynomial over GF(2) modulo the CRC's, its highest coefficient in bit 0; appending k zero bytes
multiplies it by x^8k. kernels/blocks.cu says how that is used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

POLYNOMIAL = 0x82F63B78
_X8 = 1 << (31 - 8)


def _multiply(a: int, b: U32) -> U32:
    """The product of a polynomial with each of many."""
    product, b = np.zeros_like(b), b.copy()
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> np.uint32(1)) ^ np.where(b & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return product


def power_table() -> U32:
    """x^(8 d 256^k) for k from 0 to 3 and d from 0 to 255, so that any 32-bit count of zero bytes is four products."""
    table = np.empty((4, 256), np.uint32)
    base = _X8
    for row in table:
        row[0] = 1 << 31
        filled = 1
        power = base  # base^filled
        while filled < 256:
            row[filled : 2 * filled] = _multiply(power, row[:filled])
            power = int(_multiply(power, np.array([power], np.uint32))[0])
            filled *= 2
        base = power
    return table


def stride_table(nbytes: int) -> U32:
    """For each of a register's four bytes, what its 256 values become once `nbytes` zero bytes are appended."""
    powers = power_table()
    factor = np.array([1 << 31], np.uint32)
    for k in range(4):
        factor = _multiply(int(powers[k, nbytes >> 8 * k & 0xFF]), factor)
    values = np.arange(256, dtype=np.uint32)
    return np.stack([_multiply(int(factor[0]), values << np.uint32(8 * k)) for k in range(4)])
