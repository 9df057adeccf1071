"""Frames of literals stay the same bit for bit, however they are made: saves of equal tensors are equal files.

literal_frames.json has the digests of what the encoder of version 1 made of the slices here, which depend on nothing
but this file and SHA-3. `python -m tests.codecs.test_literals_golden MODULE` prints those of a compiled `_literals`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).with_name("literal_frames.json")
REAL_STATE = Path(__file__).parents[1] / "data" / "gpt_block.safetensors"
KIB = 1 << 10

LENGTHS = [*range(1024, 1033), 4095, 16_384, 65_537, 131_071, 131_072, 131_073, 131_072 + 63, 131_072 + 64, 300_001]
SKEWS = [(1, 1), (51, 50), (6, 5), (21, 13), (2, 1), (4, 1)]  # how much rarer each symbol is than the one before


def random_bytes(name: str, count: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(count), np.uint8)


def drawn(name: str, count: int, symbols: np.ndarray, skew: tuple[int, int]) -> np.ndarray:
    """Random symbols, each rarer than the one before, with integers only."""
    shares = [1 << 28]
    while len(shares) < symbols.size:
        shares.append(max(1, shares[-1] * skew[1] // skew[0]))
    bounds = np.cumsum(np.array(shares, np.uint64))
    numbers = random_bytes(name, 8 * count).view("<u8") % bounds[-1]
    return symbols[np.searchsorted(bounds, numbers, side="right")].astype(np.uint8)


def permuted(name: str, values: np.ndarray) -> np.ndarray:
    return values[np.argsort(random_bytes(name, 8 * values.size).view("<u8"), kind="stable")]


def of_all_lengths() -> Iterator[tuple[str, np.ndarray]]:
    for count in LENGTHS:
        for symbols, first in ((2, 127), (20, 95), (128, 100), (129, 0), (256, 0)):
            name = f"{count} of {symbols}"
            yield name, drawn(name, count, np.arange(first, first + symbols), (21, 20))


def of_all_alphabets() -> Iterator[tuple[str, np.ndarray]]:
    for symbols in (1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 40, 48, 49, 64, 65, 100, 127, 128, 129, 200, 255, 256):
        for skew in SKEWS:
            for order in ("rising", "permuted"):
                name = f"{symbols} symbols, {skew[0]}/{skew[1]}, {order}"
                alphabet = np.arange(256 - symbols, 256)
                if order == "permuted":
                    alphabet = permuted(name, np.arange(256))[:symbols]
                yield name, drawn(name, 20_000 if symbols % 2 else 128 * KIB, alphabet, skew)


def of_long_codes() -> Iterator[tuple[str, np.ndarray]]:
    """Counts like Fibonacci's numbers: the longest codes there can be, in runs and in random order."""
    for symbols in range(10, 25):
        counts = [1, 1]
        while len(counts) < symbols:
            counts.append(counts[-1] + counts[-2])
        counts[-1] += 1024
        for first in (0, 106, 230):
            name = f"{symbols} long codes from {first}"
            values = np.repeat(np.arange(first, first + symbols), counts)
            yield f"{name}, in runs", values.astype(np.uint8)
            yield name, permuted(name, values).astype(np.uint8)


def of_odd_kinds() -> Iterator[tuple[str, np.ndarray]]:
    exponents = drawn("exponents", 128 * KIB, np.arange(95, 125), (13, 10))
    for odd in (0, 89, 128, 129, 255):
        for at in (0, 70_001, 131_071):
            data = exponents.copy()
            data[at] = odd
            yield f"{odd} at {at}", data
    yield "zeros among them", np.where(random_bytes("where", exponents.size) < 30, 0, exponents).astype(np.uint8)
    yield "noise", random_bytes("noise", 300_000)
    yield "noise and a run", np.concatenate([random_bytes("noise", 128 * KIB), np.full(128 * KIB, 7, np.uint8)])
    yield "in order", np.arange(300_000).astype(np.uint8)
    for symbols in (2, 4, 64, 128, 256):
        yield f"{symbols} equal shares", np.repeat(np.arange(symbols), 8192 // symbols).astype(np.uint8)
    for name, tensor in sorted(load_file(REAL_STATE).items()):
        high = tensor.contiguous().view(torch.uint8).numpy().reshape(-1, tensor.element_size())[:, -2:]
        words = np.ascontiguousarray(high).view("<u2").reshape(-1)
        if words.size >= KIB:
            yield name, (words >> 7).astype(np.uint8)


KINDS = {kind.__name__: kind for kind in (of_all_lengths, of_all_alphabets, of_long_codes, of_odd_kinds)}


def digests(literals: ModuleType, kind: str) -> dict[str, str]:
    """The length of each slice's frame, and the beginning of its digest."""
    found = {}
    for name, data in KINDS[kind]():
        out = bytearray(data.size + data.size // KIB + 64)
        nbytes = literals.encode_literals(memoryview(data), memoryview(out))
        found[name] = f"{nbytes} {hashlib.sha256(out[:nbytes]).hexdigest()[:16]}"
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_frames_stay_the_same(kind: str) -> None:
    # compiled where there is a C compiler
    literals = pytest.importorskip("dcp_nvcomp.codecs.coders._literals")
    golden = json.loads(GOLDEN.read_text())[kind]
    assert len(golden) > 30
    assert digests(literals, kind) == golden


if __name__ == "__main__":
    spec = spec_from_file_location("_literals", sys.argv[1])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    print(json.dumps({kind: digests(module, kind) for kind in KINDS}, indent=0))
