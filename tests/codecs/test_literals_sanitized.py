"""The encoder of literals-only zstd frames from its sources, under AddressSanitizer and UndefinedBehaviorSanitizer.

What is installed was compiled once; this compiles what is there, without warnings. So mutations of the sources are seen
here (tests/faults/mutations/literals.py).
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.codecs.zstd_oracle import decode
from tests.effort import THOROUGH

COMPILER = shutil.which("gcc")
SOURCE = Path(__file__).parents[2] / "dcp_nvcomp" / "codecs" / "coders" / "_literals.c"
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no gcc")

ENCODE = """
import pickle, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_literals", sys.argv[1])
literals = module_from_spec(spec)
spec.loader.exec_module(literals)
"""
ALL = """
frames = []
for data in pickle.load(open(sys.argv[2], "rb")):
    # as little room as it takes, on a heap that is watched
    out = bytearray(9 + len(data) + 3 * -(-len(data) // (128 << 10)) + 8)
    frames.append(bytes(out[: literals.encode_literals(memoryview(data), memoryview(out))]))
    less = bytearray(len(out) - 1)
    assert literals.encode_literals(memoryview(data), memoryview(less)) == 0
pickle.dump(frames, open(sys.argv[3], "wb"))
"""
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
        nbytes = literals.encode_literals(memoryview(data), memoryview(out))
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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("sanitized") / "_literals.so"
    include = sysconfig.get_paths()["include"]
    options = ("-g", "-O2", "-shared", "-fPIC", f"-I{include}", *WARNINGS, *SANITIZERS)
    done = subprocess.run([COMPILER, *options, SOURCE, "-o", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


def run(source: str, *arguments: Path) -> None:
    assert COMPILER is not None
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    # Python does not free everything at its end; stacks of malloc would be of its own allocator otherwise
    options = {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "LD_PRELOAD": runtime.stdout.strip()}
    command = [sys.executable, "-c", ENCODE + source, *arguments]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


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


def test_frames_made_under_sanitizers_decode(library: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    made = edges(random) + slices(random, 3000 if THOROUGH else 150)
    (tmp_path / "slices").write_bytes(pickle.dumps(made))
    run(ALL, library, tmp_path / "slices", tmp_path / "frames")
    frames = pickle.loads((tmp_path / "frames").read_bytes())
    assert len(frames) == len(made)
    for at, (data, frame) in enumerate(zip(made, frames, strict=True)):
        assert zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False) == data
        if at % 8 == 0 or len(data) < 4096:
            assert decode(frame) == data


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "singles"])
def test_bytes_that_change_meanwhile(library: Path, tmp_path: Path, kind: str) -> None:
    """Another process writes into the slice: nothing is read or written where it does not belong."""
    random = np.random.default_rng(2)
    low = random.integers(90, 100, 1 << 17) if kind == "pairs" else random.permutation(np.arange(1 << 17) % 199 % 140)
    pair = [low.astype(np.uint8).tobytes(), random.integers(0, 200, 1 << 17).astype(np.uint8).tobytes()]
    (tmp_path / "slices").write_bytes(pickle.dumps(pair))
    run(CHANGING, library, tmp_path / "slices")
