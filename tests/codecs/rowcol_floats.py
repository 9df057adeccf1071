"""Floats for the tests of `rowcol`: what it predicts well, and what it must not lose."""

from __future__ import annotations

import numpy as np

from dcp_nvcomp.codecs.base import U8

__all__ = ["HOSTILE", "KINDS", "floats_of", "hostile"]

KINDS = ("moments", "signed", "negative", "escapes", "escapes below", "noise", "zero rows")
HOSTILE = ("NaN payloads", "infinities", "subnormals", "negative zeros", "zero rows", "extremes by column", "ones")


def _bits(values: np.ndarray, width: int) -> U8:
    """fp32 as it is, or cut to bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits if width == 4 else (bits >> 16).astype(np.uint16)).view(np.uint8)


def floats_of(random: np.random.Generator, count: int, columns: int, width: int, kind: str) -> U8:
    """Floats in rows of `columns`, of which the last may be short, as bytes."""
    rows = -(-count // columns)
    if kind == "noise":
        return random.integers(0, 256, count * width, np.uint8)
    scales = np.exp2(random.normal(-20, 3, (rows, 1))) * np.exp2(random.normal(0, 3, columns))
    values = (scales * np.exp2(random.normal(0, 0.5, (rows, columns)))).reshape(-1)[:count]
    if kind == "signed":
        values *= random.choice([-1.0, 1.0], count)
    elif kind == "negative":
        values = -values
    elif kind == "escapes":
        values[random.random(count) < 0.004] *= 1e18
    elif kind == "escapes below":  # by what a byte would still have room for
        values[random.random(count) < 0.004] *= 2.0**-12
    elif kind == "zero rows":
        values[np.arange(count) // columns % 5 == 0] = 0
    return _bits(values, width)


def hostile(count: int, columns: int, width: int, kind: str) -> U8:
    """Bits that no training makes, in rows of `columns`."""
    row, column = np.divmod(np.arange(count, dtype=np.uint32), np.uint32(columns))
    bits = {
        "NaN payloads": 0x7F80_0001 + row * 0x10_0001 % 0x7F_FFFF + (column % 2 << 31),
        "infinities": 0x7F80_0000 + (column % 3 % 2 << 31),
        "subnormals": (row * 977 + column * 31) % 0x7F_FFFF,
        "negative zeros": np.full(count, 0x8000_0000, np.uint32),
        "zero rows": np.where(row % 2 == 0, 0, 0x3F80_0000 + column * 0x1_0000),
        "extremes by column": np.where(column % 2 == 0, 0, 0x7FFF_FFFF),
        "ones": np.full(count, 0xFFFF_FFFF, np.uint32),
    }[kind].astype(np.uint32)
    return (bits if width == 4 else (bits >> 16).astype(np.uint16)).view(np.uint8)
