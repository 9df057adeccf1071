"""Slices for the coders of literals-only frames: made ones of every shape, and exponent planes of real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

__all__ = ["KIB", "deep", "exponent_planes", "log_uniform", "made_slice", "misplaced", "skewed"]

U8 = np.ndarray

KIB = 1 << 10
MAX_NBYTES = 128 * KIB
_DATA = Path(__file__).parents[1] / "data" / "gpt_block.safetensors"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)


def skewed(random: np.random.Generator, count: int, symbols: int, first: int, skew: float) -> U8:
    """Return bytes of `symbols` values from `first` on, each `skew` times as frequent as the next."""
    shares = skew ** -np.arange(symbols, dtype=np.float64)
    return ((first + random.choice(symbols, count, p=shares / shares.sum())) % 256).astype(np.uint8)


def deep(random: np.random.Generator, symbols: int, first: int, growth: float = 1.6180339887) -> U8:
    """Return as many bytes as it takes for each symbol to be `growth` times as frequent as the one before.

    With Fibonacci's numbers Huffman's tree is a list, the deepest there is: codes reach the limit of 11 bits.
    """
    counts, total = [], 0
    for i in range(symbols):
        counts.append(max(1, round(growth**i)))
        total += counts[-1]
        if total > MAX_NBYTES:
            counts[-1] -= total - MAX_NBYTES
            break
    used = (first + random.permutation(len(counts))) % 256
    data = np.repeat(used.astype(np.uint8), counts)
    random.shuffle(data)
    return data


def misplaced(random: np.random.Generator, count: int) -> U8:
    """Return bytes that are nearly all the same, with other ones here and there."""
    data = np.full(count, random.integers(256), np.uint8)
    others = random.integers(0, count, int(random.integers(1, 300)))
    data[others] = random.integers(0, 256, others.size)
    return data


def log_uniform(random: np.random.Generator) -> int:
    """Return a length from 1 byte to 128 KiB; each power of two is as likely as the next."""
    return min(int(np.exp(random.uniform(0, np.log(MAX_NBYTES + 1)))), MAX_NBYTES)


def made_slice(random: np.random.Generator, planes: Sequence[U8]) -> U8:
    """Return a slice of any kind, or a part of one of `planes`."""
    count, kind = log_uniform(random), int(random.integers(20))
    if kind == 0:
        return np.full(count, random.integers(256), np.uint8)
    if kind == 1:
        return random.integers(0, 256, count, np.uint8)
    if kind < 4:
        return deep(random, int(random.integers(2, 26)), int(random.integers(256)))
    if kind < 6:
        return misplaced(random, count)
    if kind < 13:
        symbols = int(random.choice([2, 3, 16, 40, 128, 129, 130, 200, 256, random.integers(2, 257)]))
        skew = float(random.choice([1.0, 1.01, 1.03, 1.1, 1.3, 1.618, 2.0, 3.0]))
        return skewed(random, count, symbols, int(random.integers(256)), skew)
    plane = planes[int(random.integers(len(planes)))]
    start = int(random.integers(max(1, plane.size - count + 1)))
    return plane[start : start + count]


def exponent_planes() -> dict[str, U8]:
    """Return the exponent plane of each real tensor as it is stored, and in each other type."""
    from safetensors.torch import load_file  # which a GPU host may lack

    planes = {}
    for name, tensor in load_file(_DATA).items():
        for dtype in _DTYPES:
            values = tensor.to(dtype)
            width = values.element_size() // (1 + values.is_complex())
            bits = values.reshape(-1).view(torch.uint8).numpy().reshape(-1, width)
            # 8 bits below the sign
            plane = bits[:, -1].astype(np.uint16) << 1 | bits[:, -2] >> 7
            planes[f"{name} {dtype}"] = plane.astype(np.uint8)
    return planes
