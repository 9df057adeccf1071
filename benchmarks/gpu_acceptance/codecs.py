"""Step: every codec in both directions against the CPU engine, in batches of many sizes.

nvCOMP's history has encoders and decoders that were wrong for certain blocks and batch sizes, so both vary: batches of
1 to some hundred blocks, and blocks of weights, of noise, of one value, of lengths that are multiples of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.results import Probe
from benchmarks.gpu_device import host_memory
from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.engine import CudaEngine, DecodeJob, EncodeJob
from tests.engines.cases import cpu_encode, floats, weights

_CODERS = (
    Zstd(),
    Zstd(literals_only=True),
    Zstd(32 << 10),
    Deflate(),
    Deflate(literals_only=True),
    Deflate(32 << 10, literals_only=True),
)
_ANS_WIDTHS = {"|u1": 2, "<f2": 2, "<f4": 4}


def probes(host: Host) -> Iterator[Probe]:
    device = cache(host.device)
    engine = cache(lambda: host.engine(device(), host.pick(4096, 32) * MIB))
    for chain in _chains(host):
        yield _name(chain), partial(_both_ways, host, engine, chain)
    for data_type in _ANS_WIDTHS:
        yield f"ans {data_type}", partial(_ans, host, lambda: str(device().nvcomp.__version__), engine, data_type)


def _chains(host: Host) -> Iterator[CodecChain]:
    for coder in host.pick(_CODERS, _CODERS[1:5:3]):
        for width in host.pick((2, 4, 8), (4,)):
            yield CodecChain(Planes(width, ("exponent",)), coder)
        yield CodecChain(Bytes(), coder)
    yield CodecChain(Planes(4, ("low", "rest", "exponent")), Zstd())
    yield CodecChain(Planes(2, ()), None)
    yield CodecChain(Bytes(), None)


def _name(chain: CodecChain) -> str:
    """Return a chain in words: `planes of 2 bytes, zstd, 128 KiB`."""
    planes = f"planes of {chain.array_to_bytes.float_nbytes} bytes" if isinstance(chain.array_to_bytes, Planes) else ""
    coded = getattr(chain.array_to_bytes, "coded", ())
    words = [planes or "bytes", f"coded {'+'.join(coded)}" if len(coded) > 1 else ""]
    if chain.coder is not None:
        words += [type(chain.coder).__name__.lower()]
        words += [f"{chain.coder.slice_nbytes >> 10} KiB"]
        words += ["literals only"] * getattr(chain.coder, "literals_only", False)
    return ", ".join(word for word in words if word)


@cache
def _blocks(host: Host, width: int) -> list[np.ndarray]:
    """Return many blocks of every kind; the first is of weights."""
    size, some = host.pick(1 << 20, 1 << 16), host.pick(70_001, 7_001)
    few = [
        weights(width, size // width),
        weights(width, some, signs="positive", seed=1),
        weights(width, 33, signs="negative", seed=2),
        np.zeros(4 * some // width * width, np.uint8),
        np.full(size, 0x3C, np.uint8),
        floats(width, some // width, "mixed", 5),
        weights(width, 1, seed=4),
    ]
    more = [weights(width, 1000 + 997 * seed, seed=seed) for seed in range(host.pick(96, 4))]
    return few + more


def _batches(count: int) -> Iterator[range]:
    """Yield ranges of block numbers, of 1, 3, 17 and all blocks."""
    for size in (1, 3, 17):
        if size < count:
            yield range(size)
    yield range(count)


def _on_device(block: np.ndarray, device: torch.device) -> Tensor:
    memory = torch.zeros(block.size + 64, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 16
    memory[start : start + block.size] = torch.from_numpy(block).to(device)
    return memory[start : start + block.size]


def _encoded(
    host: Host, engine: CudaEngine, tensors: Sequence[Tensor], chain: CodecChain
) -> tuple[Sequence[EncodedBlock], Tensor]:
    """Return the blocks as the GPU encodes them, and the memory that they lie in."""
    room = host_memory(sum(chain.max_encoded_nbytes(tensor.numel()) for tensor in tensors), host.torch_device)
    jobs = [EncodeJob((tensor,), chain) for tensor in tensors]
    return engine.encode_unaided(jobs, room.numpy().data), room


def _wrong_on_gpu(
    engine: CudaEngine, encoded: Sequence[EncodedBlock], chain: CodecChain, blocks: Sequence[Tensor]
) -> int:
    """Return how many encoded blocks the GPU decodes to something else than these."""
    outs = [torch.full_like(block, 0xEE) for block in blocks]
    jobs = [DecodeJob(one.data, one.row, chain, out) for one, out in zip(encoded, outs, strict=True)]
    noticed = False
    try:
        engine.decode_unaided(jobs)
    except RuntimeError as error:
        noticed = "to wrong bytes" in str(error)
        if not noticed:
            raise
    wrong = sum(not torch.equal(out, block) for out, block in zip(outs, blocks, strict=True))
    if noticed != (wrong > 0):
        raise AssertionError(f"{wrong} blocks were decoded to wrong bytes; the engine noticed: {noticed}")
    return wrong


def _wrong_on_cpu(encoded: Sequence[EncodedBlock], chain: CodecChain, blocks: Sequence[np.ndarray]) -> int:
    """Return how many encoded blocks the CPU engine decodes to something else than these, or refuses."""
    cpu, wrong = CpuEngine(), 0
    for one, block in zip(encoded, blocks, strict=True):
        out = np.empty_like(block)
        try:
            cpu.decode(one.data, one.row, chain, out, verify="full")
        except Exception:
            wrong += 1
        else:
            wrong += out.tobytes() != block.tobytes()
    return wrong


def _both_ways(host: Host, engine: Callable[[], CudaEngine], chain: CodecChain) -> Mapping[str, Any]:
    codec = chain.array_to_bytes
    blocks = _blocks(host, codec.float_nbytes if isinstance(codec, Planes) else 2)
    tensors = [_on_device(block, host.torch_device) for block in blocks]
    by_cpu = [cpu_encode(block, chain) for block in blocks]
    row: dict[str, Any] = {"chain": _name(chain), "blocks": 0, "encoded_wrong": 0, "decoded_wrong": 0, "both_wrong": 0}
    for batch in _batches(len(blocks)):
        sources, originals = [tensors[at] for at in batch], [blocks[at] for at in batch]
        if engine().coders.encodes(chain):
            encoded, _room = _encoded(host, engine(), sources, chain)
        else:  # frames with matches, which no GPU writes
            encoded = [by_cpu[at] for at in batch]
        row["blocks"] += len(batch)
        row["encoded_wrong"] += _wrong_on_cpu(encoded, chain, originals)
        row["both_wrong"] += _wrong_on_gpu(engine(), encoded, chain, sources)
        row["decoded_wrong"] += _wrong_on_gpu(engine(), [by_cpu[at] for at in batch], chain, sources)
        # of the last batch, which is of all blocks
        row["size"] = sum(one.data.nbytes for one in encoded) / sum(by_cpu[at].data.nbytes for at in batch)
    if row["encoded_wrong"] or row["decoded_wrong"] or row["both_wrong"]:
        return {"status": "failed", "error": f"blocks came out wrong: {row}", "rows": {"correct": [row]}}
    return {"rows": {"correct": [row]}}


def _ans(host: Host, version: Callable[[], str], engine: Callable[[], CudaEngine], data_type: str) -> Mapping[str, Any]:
    """Encode and decode with ANS on the GPU: no other decoder of it exists."""
    wrong, sizes = 0, {}
    blocks = [*_blocks(host, _ANS_WIDTHS[data_type])[:12], weights(2, host.pick(5, 1) * MIB // 2)]
    tensors = [_on_device(block, host.torch_device) for block in blocks]
    for slice_nbytes in (64 << 10, 1 << 20, 16 << 20):
        chain = CodecChain(Bytes(), Ans(slice_nbytes, data_type, version()))
        encoded, _room = _encoded(host, engine(), tensors, chain)
        wrong += _wrong_on_gpu(engine(), encoded, chain, tensors)
        sizes[f"{slice_nbytes >> 10} KiB"] = encoded[-1].data.nbytes / blocks[-1].nbytes
    if wrong:
        raise AssertionError(f"{wrong} blocks came out wrong")
    return {"sizes of weights by slice": sizes}
