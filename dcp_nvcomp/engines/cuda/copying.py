"""Blocks of a GPU through the CPU engine: what is left when the GPU's own engine fails, or may not be trusted.

Uses nothing but torch's own copies on the calling thread's stream, so that whatever is wrong with nvCOMP, CuPy or the
kernels does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.encoded import U8, EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.decode import DecodeJob
from dcp_nvcomp.engines.cuda.encode import EncodeJob
from dcp_nvcomp.errors import CheckpointError, CodecUnavailableError, CorruptDataError


class CopyingEngine:
    """Encodes and decodes blocks of any device on the CPU. Not for several threads at once."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self._cpu = CpuEngine()

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        """Encode blocks, as `CudaEngine.encode` does."""
        encoded: list[EncodedBlock] = []
        position = 0
        for job in jobs:
            encoded.append(self.encode_block(job, out[position:]))
            position += encoded[-1].data.nbytes
        return encoded

    def encode_block(self, job: EncodeJob, out: memoryview) -> EncodedBlock:
        """Encode a block to the start of `out`."""
        self._check(job.chain)
        with self._copies(job.tensors[0].device):
            if job.ready is not None:
                torch.cuda.current_stream(job.tensors[0].device).wait_event(job.ready)
            host = to_host(job.tensors)
        return self._cpu.encode(host, job.chain, out)

    def decode_checked(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        """Decode blocks, as `CudaEngine.decode_checked` does."""
        for job in jobs:
            self.place(self.decoded(job, verify=verify), job)

    def decoded(self, job: DecodeJob, *, verify: str) -> U8:
        """Return a decoded block in host memory."""
        self._check(job.chain)
        host = np.empty(job.out.numel(), np.uint8)
        try:
            self._cpu.decode(job.data, job.row, job.chain, host, verify=verify)
        except CorruptDataError as error:
            raise CorruptDataError(error.message, path=job.path, fqn=job.fqn, byte_range=job.byte_range) from error
        return host

    def place(self, host: U8, job: DecodeJob) -> None:
        """Copy a decoded block to its destination; complete on return."""
        with self.session([job.out]):
            to_device(host, job.out)

    @contextmanager
    def scratch(self, jobs: Sequence[DecodeJob]) -> Iterator[Sequence[DecodeJob] | None]:
        """As `CudaEngine.scratch`, in host memory: that is where the blocks come from here."""
        yield [replace(job, out=torch.empty(job.out.numel(), dtype=torch.uint8)) for job in jobs]

    @contextmanager
    def session(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Copies between these tensors, complete at the end."""
        device = tensors[0].device
        with self._copies(device):
            yield
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    @contextmanager
    def _copies(self, device: torch.device) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            earlier = f", after {self.reason}" if self.reason else ""
            what = f"{type(error).__name__}: {error}{earlier}"
            raise CodecUnavailableError(
                f"The GPU can't even copy data ({device}: {what}). Free GPU memory, or check the GPU with nvidia-smi."
            ) from error

    def _check(self, chain: CodecChain) -> None:
        if chain.needs_gpu:
            raise CodecUnavailableError(
                f"The GPU could not run nvCOMP's ANS ({self.reason}), and nothing else can. If it is short of memory, "
                "free some or lower device_memory_budget. With codec='auto' the CPU engine takes over what a GPU can't."
            )


def to_host(tensors: Sequence[Tensor]) -> U8:
    """Return the bytes of tensors, one after the other, in host memory."""
    runs = [tensor.contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in tensors]
    host: U8 = (runs[0] if len(runs) == 1 else torch.cat(runs)).numpy()
    return host


def to_device(host: U8, out: Tensor) -> None:
    """Copy bytes to a tensor."""
    out.copy_(torch.from_numpy(host))
