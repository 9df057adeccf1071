"""Codes a known block in both directions, on a GPU and on the CPU, before a GPU is given anything that matters."""

from __future__ import annotations

import numpy as np
import torch

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.coders.deflate import Deflate
from dcp_nvcomp.codecs.coders.zstd import Zstd
from dcp_nvcomp.codecs.encoded import U8
from dcp_nvcomp.codecs.transforms.planes import Planes
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.decode import DecodeJob
from dcp_nvcomp.engines.cuda.encode import EncodeJob
from dcp_nvcomp.engines.cuda.engine import CudaEngine
from dcp_nvcomp.engines.cuda.health import LITERALS, NVCOMP

# One of each kind of coder that several engines have; ANS is left out, as nothing else could tell if it is right.
_ZSTD = CodecChain(Planes(2), Zstd(literals_only=True))
SELF_TEST_CHAINS = (_ZSTD, CodecChain(Planes(2), Deflate(literals_only=True)))
_NBYTES = 1 << 20


def run_self_test(engine: CudaEngine, device: torch.device) -> None:
    """Test what was not tested before: nvCOMP's coders, and our own kernels once an engine is to use them.

    Records in the engine's health which of them do not work, and if none does, that the device is broken.
    """
    health, before = engine.health, len(engine.health.tested)
    for chain in SELF_TEST_CHAINS:
        _test(engine, NVCOMP, chain, device)
    # asked after nvCOMP's own test: if that fails, ours take its place
    if engine.coders.may_use_literals(_ZSTD):
        _test(engine, LITERALS, _ZSTD, device)
    if len(health.tested) > before:
        engine.memory.release()  # it may be more than the budget
    if health.refused.keys() >= health.tested:
        health.broken = f"its self-test failed ({next(iter(health.refused.values()))})"


def _test(engine: CudaEngine, who: str, chain: CodecChain, device: torch.device) -> None:
    assert chain.coder is not None
    health, coder = engine.health, type(chain.coder)
    if (who, coder) in health.tested:
        return
    try:
        with engine.coders.preferring(who):
            if engine.coders.encodes(chain):
                _check(engine, chain, _bfloat16_weights(), device)
    except (torch.OutOfMemoryError, MemoryError):
        raise  # says nothing of the coder
    except Exception as error:  # whatever it is, this coder can't be used
        health.refuse(who, coder, error)
    health.tested.add((who, coder))


def _bfloat16_weights() -> U8:
    """1 MiB of what this package is for: exponents with some ten values, mantissas that are random."""
    values = np.random.default_rng(0).normal(0, 0.02, _NBYTES // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _check(engine: CudaEngine, chain: CodecChain, block: U8, device: torch.device) -> None:
    """Raise an error of any type if the GPU does not code the block as the CPU engine does: CRCs tell."""
    cpu, room = CpuEngine(), chain.max_encoded_nbytes(block.nbytes)
    (ours,) = engine.encode_unaided(
        [EncodeJob((torch.from_numpy(block).to(device),), chain)], memoryview(bytearray(room))
    )
    decoded = np.empty_like(block)
    cpu.decode(ours.data, ours.row, chain, decoded, verify="full")
    theirs = cpu.encode(block, chain, memoryview(bytearray(room)))
    out = torch.zeros(block.nbytes, dtype=torch.uint8, device=device)
    engine.decode_unaided([DecodeJob(theirs.data, theirs.row, chain, out)])
