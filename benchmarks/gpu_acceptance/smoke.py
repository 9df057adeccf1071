"""The first minute on a GPU: every coder once in both directions, each failure with its traceback, then a normal exit.

    python -m benchmarks.gpu_acceptance.smoke [--stand-in]

The exit status says if the process could end: CUDA's libraries, nvCOMP's and torch's are taken apart in an order that
nobody chooses.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import moments, weights
from benchmarks.gpu_device import host_memory
from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.engine import CudaEngine, DecodeJob, EncodeJob, EnginePolicy

_LITERALS = Zstd(literals_only=True)


def _chains(version: str) -> Iterator[CodecChain]:
    """Yield what the GPU encodes."""
    yield CodecChain(Planes(4), _LITERALS)
    for coder in (_LITERALS, Deflate(literals_only=True), Deflate()):
        yield CodecChain(Planes(2), coder)
    yield CodecChain(Bytes(), None)
    for data_type in ("<f2", "<f4", "|u1"):
        yield CodecChain(Bytes(), Ans(MIB, data_type, version))


def _both_ways(host: Host, device: Device, chain: CodecChain) -> str:
    make = moments if "4" in repr(chain.array_to_bytes) or "<f4" in repr(chain.coder) else weights
    data = make(host.pick(64, 2) * MIB, host.torch_device)
    engine = CudaEngine(host.torch_device, EnginePolicy(2048 * MIB), backend=device)
    blocks = list(data.split(MIB))
    room = host_memory(sum(chain.max_encoded_nbytes(block.numel()) for block in blocks), host.torch_device)
    outs = [torch.zeros_like(block) for block in blocks]
    seconds = []
    for _ in range(3):  # the first one compiles
        start = time.perf_counter()
        encoded = engine.encode_unaided([EncodeJob((block,), chain) for block in blocks], room.numpy().data)
        between = time.perf_counter()
        rows = zip(encoded, outs, strict=True)
        engine.decode_unaided([DecodeJob(one.data, one.row, chain, out) for one, out in rows])
        seconds = [between - start, time.perf_counter() - between]
    assert all(torch.equal(out, block) for out, block in zip(outs, blocks, strict=True)), "other bytes came back"
    if not isinstance(chain.coder, Ans):
        cpu = CpuEngine()
        for one, block in list(zip(encoded, blocks, strict=True))[:4]:
            found = np.empty(block.numel(), np.uint8)
            cpu.decode(one.data, one.row, chain, found, verify="full")
            assert (found == block.cpu().numpy()).all(), "the CPU engine decodes to other bytes"
    ratio = data.numel() / sum(one.data.nbytes for one in encoded)
    return f"ratio {ratio:.3f}, encode {seconds[0] * 1e3:.1f} ms, decode {seconds[1] * 1e3:.1f} ms"


def _freed_engines(host: Host) -> str:
    """Free engines that have worked, with nvCOMP's codecs, after others on the same GPU were made."""
    data = weights(host.pick(8, 1) * MIB, host.torch_device)
    chain = CodecChain(Planes(2), Deflate(literals_only=True))
    room = host_memory(chain.max_encoded_nbytes(data.numel()), host.torch_device)
    for _ in range(4):
        engine = CudaEngine(host.torch_device, EnginePolicy(2048 * MIB), backend=host.device())
        engine.encode_unaided([EncodeJob((data,), chain)], room.numpy().data)
        del engine
        gc.collect()
        host.synchronize()
    return "engines were freed after they worked"


def _freed_after_its_stream(host: Host) -> str:
    """Free a tensor after the stream of the session that it was used in: what every program does at its end."""
    other, tensor = host.device(), torch.ones(8 * MIB, dtype=torch.uint8, device=host.torch_device)
    with other.session([tensor]):
        pass
    del other
    gc.collect()
    del tensor
    host.synchronize()
    torch.empty(8 * MIB, device=host.torch_device)
    return "a tensor was freed after the stream"


def _host_crc() -> str:
    memory = np.ones(256 * MIB, np.uint8)
    checksum(memory.data)
    start = time.perf_counter()
    checksum(memory.data)
    return f"CRC32C on one core of the host: {memory.nbytes / (time.perf_counter() - start) / 1e9:.1f} GB/s"


def main() -> None:
    """Run all of it; the exit status is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true", help="run it small, on the CPU stand-in for a GPU")
    host, began, failed = Host(parser.parse_args().stand_in), time.monotonic(), []

    def attempt(name: str, work: Callable[[], str]) -> None:
        try:
            text = f"OK {name}: {work()}"
        except BaseException:
            failed.append(name)
            text = f"FAILED {name}\n{traceback.format_exc()}"
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    device = host.device()
    version = str(device.nvcomp.__version__)
    for chain in _chains(version):
        attempt(str(chain), lambda chain=chain: _both_ways(host, device, chain))  # type: ignore[misc]
    attempt("end of engines", lambda: _freed_engines(host))
    attempt("end of a stream", lambda: _freed_after_its_stream(host))
    attempt("host", _host_crc)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
