"""Slices to encode, of all kinds and at all limits."""

from __future__ import annotations

import numpy as np


def skewed(random: np.random.Generator, count: int, symbols: int, first: int, skew: float) -> np.ndarray:
    """Symbols from `first` on, each `skew` times as often as the next, in random order."""
    shares = skew ** -np.arange(min(symbols, 256 - first), dtype=np.float64)
    return (first + random.choice(shares.size, count, p=shares / shares.sum())).astype(np.uint8)


def slices(random: np.random.Generator, count: int) -> list[bytes]:
    """Slices of all kinds: few values and many, in order or not, nearly equal and nearly never, alone and in runs."""
    made = []
    for _ in range(count):
        length = int(2 ** random.uniform(10, 17.5 if random.random() < 0.1 else 14))
        symbols = int(random.integers(1, 257 if random.random() < 0.5 else 40))
        alphabet = np.arange(symbols) + random.integers(0, 257 - symbols)
        if random.random() < 0.3:
            alphabet = random.permutation(256)[:symbols]
        shares = random.choice([1.0, 1.02, 1.2, 1.618, 2.0, 4.0]) ** -np.arange(symbols, dtype=np.float64)
        data = alphabet[random.choice(symbols, length, p=shares / shares.sum())]
        if random.random() < 0.2:
            data = np.repeat(data, random.integers(1, 3000, data.size) if random.random() < 0.3 else 3)[:length]
        if random.random() < 0.2:
            data[random.integers(length)] = random.integers(256)
        made.append(data.astype(np.uint8).tobytes())
    return made


def edges(random: np.random.Generator) -> list[bytes]:
    """Slices at the limits: each length of the last stream, short last blocks, noise, the longest codes."""
    few = random.choice(8, 300_000, p=(shares := 2.0 ** -np.arange(8)) / shares.sum()).astype(np.uint8) + np.uint8(100)
    many = random.integers(60, 240, 300_000).astype(np.uint8)
    noise = random.integers(0, 256, 300_000).astype(np.uint8)
    lengths = [*range(1024, 1033), 131_071, 131_072, 131_073, 131_072 + 63, 131_072 + 64, 131_072 + 1000, 300_000]
    made = [source[:length].tobytes() for source in (few, many, noise) for length in lengths]
    for symbols in (2, 4, 64, 128, 256):  # codes of one length: a single weight
        made.append(np.repeat(np.arange(symbols), 8192 // symbols).astype(np.uint8).tobytes())
    for symbols in range(12, 24):
        counts = [1, 1]
        while len(counts) < symbols:
            counts.append(counts[-1] + counts[-2])
        counts[-1] += 1024
        for first in (0, 106, 230):
            values = np.repeat(random.permutation(symbols) + first, counts)
            made.append(random.permutation(values).astype(np.uint8).tobytes())
            made.append(values.astype(np.uint8).tobytes())  # in runs: long codes together
            made.append(values[::-1].astype(np.uint8).tobytes())
    return made


def damaged(random: np.random.Generator, frame: bytes) -> bytes:
    """A frame with bits flipped, bytes replaced, cut off or put in."""
    data, kind = bytearray(frame), int(random.integers(5))
    # headers and weights decide what is read and written: half of the damage is there
    end = len(data) if random.integers(2) else min(len(data), 60)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(end))
        if kind == 0:
            data[at] ^= 1 << int(random.integers(8))
        elif kind == 1:
            data[at] = int(random.integers(256))
        elif kind == 2:
            data[at : at + 8] = random.bytes(len(data[at : at + 8]))
        elif kind == 3 and len(data) > 20:
            del data[int(random.integers(10, len(data))) :]
            end = min(end, len(data))
        else:
            data[at:at] = random.bytes(int(random.integers(1, 10)))
    return bytes(data)


# Encodes bytes that another process changes meanwhile; the module `kernels` is there.
CHANGING = """
import mmap, os, signal, zstandard
narrow, wide = pickle.load(open(sys.argv[2], "rb"))
data, out = mmap.mmap(-1, len(narrow)), bytearray(len(narrow) + 20)
data[:] = narrow
parent = os.getpid()
writer = os.fork()
while not writer:
    if os.getppid() != parent:
        os._exit(0)
    data[64:] = wide[64:]
    data[64:] = narrow[64:]
try:
    mixed, decompressor = 0, zstandard.ZstdDecompressor()
    for _ in range(20_000):
        nbytes = kernels.encode_literals(memoryview(data), memoryview(out))
        content = decompressor.decompress(memoryview(out)[:nbytes], allow_extra_data=False)
        assert len(content) == len(narrow)
        mixed += content[64:] not in (narrow[64:], wide[64:])
        if mixed == 50:
            break
    assert mixed >= 10, mixed  # it was seen changing
finally:
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
"""
