"""Step: hostile frames and mismatches through the engine, whose CRCs are right, each in a process of its own.

The engine must refuse each, or decode it to what the CPU engine decodes it to; and the GPU must go on working.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.results import Probe
from benchmarks.gpu_acceptance.saving import warnings_of
from benchmarks.gpu_acceptance.tampering import SLICE_NBYTES, TAMPERED_CODERS, TAMPERINGS, a_slice
from dcp_nvcomp.codecs import Bytes, CodecChain
from dcp_nvcomp.codecs.base import checksum, padded
from dcp_nvcomp.engines.cuda.engine import DecodeJob
from dcp_nvcomp.errors import CheckpointError
from tests.engines.cases import cpu_encode

_SLICES = 4


def probes(host: Host) -> Iterator[Probe]:
    # each takes a process, so the stand-in shows a few
    for what in host.pick(tuple(TAMPERINGS), ("random bytes", "a shorter slice", "a frame of another coder")):
        for name in host.pick(tuple(TAMPERED_CODERS), ("Zstd",)):
            yield f"{name}: {what}", partial(_refused, host, name, what)


def _refused(host: Host, name: str, what: str) -> Mapping[str, Any]:
    coder = TAMPERED_CODERS[name]
    chain = CodecChain(Bytes(), coder)
    block = np.frombuffer(a_slice() * _SLICES, np.uint8)
    good = cpu_encode(block, chain)
    first = padded(good.row.slice_nbytes[0])
    frame = TAMPERINGS[what](bytes(good.data[: good.row.slice_nbytes[0]]), coder)
    frame = frame[: SLICE_NBYTES - 1]  # else it would be a stored slice
    data = memoryview(frame.ljust(padded(len(frame)), b"\0") + bytes(good.data[first:]))
    row = good.row._replace(slice_nbytes=(len(frame), *good.row.slice_nbytes[1:]), encoded_crc=checksum(data))
    out, right = (torch.zeros(block.size, dtype=torch.uint8, device=host.torch_device) for _ in range(2))
    engine = host.engine(host.device(), 64 * MIB)
    with warnings_of() as warned:
        try:
            engine.decode([DecodeJob(data, row, chain, out)], verify="stored")
            outcome = "decoded"
        except CheckpointError as error:
            outcome = f"{type(error).__name__}: {error}"
    if outcome == "decoded" and out.cpu().numpy().tobytes() != block.tobytes():
        raise AssertionError("it was decoded to wrong bytes, and nothing was raised")
    engine.decode([DecodeJob(good.data, good.row, chain, right)], verify="full")
    if right.cpu().numpy().tobytes() != block.tobytes():
        raise AssertionError("a good block came out wrong afterwards")
    return {"outcome": outcome, "warnings": warned}
