"""The kernel of hash.cu on a few kilobytes: pieces of a length, and a last one of what is left."""

from __future__ import annotations

import numpy as np
import xxhash

from dcp_nvcomp.engines.cuda.batches import THREADS
from dcp_nvcomp.engines.cuda.device import Launch

from .memory import SharedMemory, expect

__all__ = ["check_hashes"]

# Lengths, and those of pieces: runs of 1024 bytes, whole stripes, and last ones of which some bytes are read twice.
_CASES = (
    (241, 1 << 20),
    (1024, 1024),
    (1025, 2048),
    (4 * 1024 + 1, 8192),
    (3000, 1000),
    (10 * 256, 256),
    (2049 + 250, 2048),
)


def check_hashes(memory: SharedMemory, launch: Launch) -> None:
    """Run all of them, and compare with xxhash."""
    for nbytes, piece_nbytes in _CASES:
        memory.clear()
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        count = -(-nbytes // piece_nbytes)
        source, digests = memory.put(data), memory.empty(16 * count)
        pieces = THREADS // 32
        launch("hash_pieces", -(-count // pieces), (source.ctypes.data, nbytes, piece_nbytes, digests.ctypes.data))
        expected = b""
        for start in range(0, nbytes, piece_nbytes):
            digest = xxhash.xxh3_128_digest(data[start : start + piece_nbytes].tobytes())
            expected += digest[:7:-1] + digest[7::-1]  # as two numbers, the low half first
        expect(f"hashes of {nbytes} bytes in pieces of {piece_nbytes}", digests, expected)
