"""The encoder of literals-only zstd frames from its sources, under AddressSanitizer and UndefinedBehaviorSanitizer.

What is installed was compiled once; this compiles what is there, without warnings. So mutations of the sources are seen
here (tests/faults/mutations/literals.py).
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.codecs.literal_slices import CHANGING, edges, slices
from tests.effort import THOROUGH

from .sanitizers import run_sanitized
from .zstd_oracle import decode

ALL = """
frames = []
for data in pickle.load(open(sys.argv[2], "rb")):
    # as little room as it takes, on a heap that is watched
    out = bytearray(9 + len(data) + 3 * -(-len(data) // (128 << 10)) + 8)
    frames.append(bytes(out[: kernels.encode_literals(memoryview(data), memoryview(out))]))
    less = bytearray(len(out) - 1)
    assert kernels.encode_literals(memoryview(data), memoryview(less)) == 0
pickle.dump(frames, open(sys.argv[3], "wb"))
"""


def test_frames_made_under_sanitizers_decode(sanitized_literals: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    made = edges(random) + slices(random, 3000 if THOROUGH else 150)
    (tmp_path / "slices").write_bytes(pickle.dumps(made))
    run_sanitized(ALL, sanitized_literals, tmp_path / "slices", tmp_path / "frames")
    frames = pickle.loads((tmp_path / "frames").read_bytes())
    assert len(frames) == len(made)
    for at, (data, frame) in enumerate(zip(made, frames, strict=True)):
        assert zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False) == data
        if at % 8 == 0 or len(data) < 4096:
            assert decode(frame) == data


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "singles"])
def test_bytes_that_change_meanwhile(sanitized_literals: Path, tmp_path: Path, kind: str) -> None:
    """Another process writes into the slice: nothing is read or written where it does not belong."""
    random = np.random.default_rng(2)
    low = random.integers(90, 100, 1 << 17) if kind == "pairs" else random.permutation(np.arange(1 << 17) % 199 % 140)
    pair = [low.astype(np.uint8).tobytes(), random.integers(0, 200, 1 << 17).astype(np.uint8).tobytes()]
    (tmp_path / "slices").write_bytes(pickle.dumps(pair))
    run_sanitized(CHANGING, sanitized_literals, tmp_path / "slices")
