"""Blocks, and what the engine tests do with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dcp_nvcomp.codecs import CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.engine import CudaEngine, DecodeJob, EncodeJob, EnginePolicy

from .nvcomp_stand_in import StandInDevice

U8 = np.ndarray

BUDGET = 64 << 20
SLICE = 1024
CHAIN = CodecChain(Planes(4), Deflate(SLICE))  # which nvCOMP codes
OWN = CodecChain(Planes(4), Zstd(SLICE, literals_only=True))  # which our kernels code
SIGNS = ("mixed", "positive", "negative")


def floats(width: int, count: int, signs: str, seed: int) -> np.ndarray:
    """Random bits, NaN and subnormals among them, with signs as asked for."""
    block = np.random.default_rng(seed).integers(0, 256, (count, width), np.uint8)
    if signs != "mixed":
        block[:, -1] = block[:, -1] & 0x7F | (0x80 if signs == "negative" else 0)
    return block.reshape(-1)


def engine_on(device: StandInDevice, budget: int = BUDGET, *, check_encodes: bool = True) -> CudaEngine:
    return CudaEngine(torch.device("cpu"), EnginePolicy(budget, check_encodes=check_encodes), backend=device)


def weights(width: int, count: int, *, signs: str = "mixed", seed: int = 0) -> U8:
    """Bits like those of trained floats: skewed exponents, random mantissas."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, count)
    values = {"mixed": values, "positive": np.abs(values), "negative": -np.abs(values)}[signs]
    if width == 8:
        return values.view(np.uint8)
    single = values.astype(np.float32)
    if width == 4:
        return single.view(np.uint8)
    return (single.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def tensor(block: U8, misaligned: int = 0, device: str = "cpu") -> torch.Tensor:
    """The block as a tensor that begins so far from a multiple of 16."""
    memory = torch.zeros(block.size + 64, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 16 + misaligned
    memory[start : start + block.size] = torch.from_numpy(block).to(device)
    return memory[start : start + block.size]


def encode(engine: CudaEngine, blocks: Sequence[torch.Tensor], chain: CodecChain) -> list[EncodedBlock]:
    nbytes = sum(chain.max_encoded_nbytes(block.numel()) for block in blocks)
    out = torch.empty(nbytes, dtype=torch.uint8, pin_memory=blocks[0].is_cuda).numpy().data
    encoded = engine.encode([EncodeJob((block,), chain) for block in blocks], out)
    assert b"".join(block.data for block in encoded) == out[: sum(block.data.nbytes for block in encoded)]
    return encoded


def cpu_encode(block: U8, chain: CodecChain) -> EncodedBlock:
    return CpuEngine().encode(block, chain, memoryview(bytearray(chain.max_encoded_nbytes(block.size))))


def decoded(encoded: EncodedBlock, chain: CodecChain = CHAIN) -> bytes:
    """What the CPU engine makes of a block."""
    out = np.empty(encoded.uncompressed_nbytes, np.uint8)
    CpuEngine().decode(encoded.data, encoded.row, chain, out, verify="full")
    return out.tobytes()


def job(encoded: EncodedBlock, chain: CodecChain, misaligned: int = 0, device: str = "cpu") -> DecodeJob:
    out = tensor(np.full(encoded.uncompressed_nbytes, 0xEE, np.uint8), misaligned, device)
    return DecodeJob(encoded.data, encoded.row, chain, out)


def assert_nothing_held(engine: CudaEngine, device: StandInDevice) -> None:
    """The arena is all that an engine keeps, and nothing else holds a piece of it."""
    engine.memory.release()
    assert device.held_nbytes == 0
