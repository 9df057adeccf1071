"""Encode and decode a great many slices with literals*.cu on a CPU: `python -m tests.engines.many_literal_frames`.

Slices are of all kinds and lengths, made ones and parts of real exponent planes. Every frame must be decoded to its
slice by libzstd and by the kernel, some also by the decoder written from the RFC, and nothing may be written beside it.
It prints what it did as JSON, with the compiled CPU encoder's lengths beside ours, and how often ours were over 1 %
longer. With OMP_NUM_THREADS=1 torch's threads don't take the time of others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from dcp_nvcomp.engines.cuda.literals import LiteralCoders
from tests.codecs import zstd_oracle

from .kernels_on_cpu import compile_literals_for_cpu
from .literal_coding import GuardedDevice, check, cpu_frame
from .literal_slices import exponent_planes, made_slice

_BATCH = 200


def run(frames: int, minutes: float, seed: int) -> dict[str, int | float]:
    """Return what was done, once there are so many frames or so many minutes have passed."""
    began, counts = time.monotonic(), Counter(seed=seed)
    planes = list(exponent_planes().values())
    with tempfile.TemporaryDirectory() as folder:
        device = GuardedDevice(compile_literals_for_cpu(Path(folder)), seed=0)
        coders = LiteralCoders(device)
        batch = 0
        while counts["frames"] < frames and time.monotonic() - began < 60 * minutes:
            random = np.random.default_rng([seed, batch])
            encoded = check(device, coders, [made_slice(random, planes) for _ in range(_BATCH)])
            oracle_at = batch % _BATCH
            for at, (data, frame) in enumerate(zip(encoded.slices, encoded.frames, strict=True)):
                nbytes, theirs = len(frame) or len(data), len(cpu_frame(data))
                counts.update(slices=1, slices_nbytes=len(data), frames=bool(frame), stored=not frame)
                if frame and at == oracle_at and len(data) < 10_000:
                    (block,) = zstd_oracle.blocks_of(frame)
                    assert block.content == data
                    counts.update({"checked_by_the_oracle": 1, f"oracle_{block.weights or block.kind}": 1})
                if theirs:
                    counts.update(compared=1, compared_nbytes=nbytes, cpu_nbytes=theirs)
                    counts.update(over_1_percent=nbytes > 1.01 * theirs)
            batch += 1
            if batch % 50 == 0:
                print(json.dumps(counts), flush=True)
    return {**counts, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.frames, arguments.minutes, arguments.seed)))
