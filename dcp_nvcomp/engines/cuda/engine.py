"""The CUDA engine: nvCOMP and the kernels, for blocks that are on a GPU. Makes the same open bytes as the CPU engine.

CudaEngine   batches under a budget, what happens when the GPU fails
encode       a batch of blocks --> encoded blocks        decode     and back
coders       slices --> frames --> slices                batches    where everything of a batch lies
device       memory, stream, kernels                     support    what is installed
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.encoded import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.batches import fitting
from dcp_nvcomp.engines.cuda.coders import NvcompCoders, is_served, stamped_chain
from dcp_nvcomp.engines.cuda.decode import BatchDecoder, DecodeJob, JobChecks
from dcp_nvcomp.engines.cuda.device import CudaDevice, Device
from dcp_nvcomp.engines.cuda.encode import BatchEncoder, EncodeJob
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.errors import CheckpointError, CodecUnavailableError, CorruptDataError

__all__ = ["CudaEngine", "DecodeJob", "EncodeJob", "JobChecks", "cuda_unavailable_reason", "stamped_chain"]

# What nvCOMP, torch and CuPy raise if the GPU runs out of memory or a call fails.
_GPU_ERRORS = (RuntimeError, ValueError, MemoryError)


class CudaEngine:
    """Encodes and decodes blocks in GPU memory. Not for several threads at once.

    If the GPU runs out of memory or nvCOMP fails, batches become smaller, and a block that fails alone is left to the
    CPU engine, with one warning. Blocks of codecs that it does not know are always left to the CPU engine.

    Args:
        device: the CUDA device of the blocks.
        device_memory_budget: bytes of device memory that a batch may take in addition to the blocks themselves. A
            block that alone takes more is a batch of its own.
        backend: what the engine runs on; by default CuPy and nvCOMP on `device`.

    Raises:
        CodecUnavailableError: there is no such device, or a package is missing.
    """

    def __init__(self, device: torch.device, *, device_memory_budget: int, backend: Device | None = None) -> None:
        assert device_memory_budget > 0
        self._device = CudaDevice(device) if backend is None else backend
        self._budget_nbytes = device_memory_budget
        coders = NvcompCoders(self._device)
        self._coders = coders
        self._encoder = BatchEncoder(self._device, coders)
        self._decoder = BatchDecoder(self._device, coders)
        self._checks = JobChecks()
        self._cpu = CpuEngine()
        self._failure = ""
        self._warned = False

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        """Encode blocks.

        Args:
            jobs: the blocks, of any chains.
            out: host memory, pinned if it is to be fast; at least the sum of `chain.max_encoded_nbytes` of the blocks.

        Returns:
            The encoded blocks, all there; they fill `out` from its start without gaps, in any order.

        Raises:
            CodecUnavailableError: the GPU can't encode a block with ANS, which only it can.
        """
        served = [at for at, job in enumerate(jobs) if is_served(job.chain)]
        encoded = dict(zip(served, self._encode_served([jobs[at] for at in served], out), strict=True))
        position = sum(block.data.nbytes for block in encoded.values())
        for at in range(len(jobs)):
            if at not in encoded:
                encoded[at] = self._encode_on_cpu(jobs[at], out[position:])
                position += encoded[at].data.nbytes
        return [encoded[at] for at in range(len(jobs))]

    def _encode_served(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        costs = self._costs(lambda: [self._encoder.cost_nbytes(job) for job in jobs], len(jobs))
        encoded: list[EncodedBlock] = []
        position, most = 0, len(jobs)
        while len(encoded) < len(jobs):
            count = fitting(costs, len(encoded), most, self._budget_nbytes)
            batch, room = jobs[len(encoded) : len(encoded) + count], out[position:]
            done: list[EncodedBlock] = []
            if not self._attempt(lambda: done.extend(self._encoder.encode(batch, room))):  # noqa: B023
                if count > 1:
                    most = count // 2
                    continue
                self._fall_back(batch[0].chain)
                done = [self._encode_on_cpu(batch[0], room)]
            encoded += done
            position += sum(block.data.nbytes for block in done)
        return encoded

    def decode(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        """Decode blocks; returns once all of them are complete.

        Args:
            jobs: the blocks.
            verify: `"stored"`, `"full"` or `"off"`.

        Raises:
            CorruptDataError: a CRC does not match, or bytes do not decode to exactly the block's size.
            UnsupportedVersionError: a block's ANS is of another version of nvCOMP.
            CodecUnavailableError: the GPU can't decode a block of ANS, which only it can.
        """
        for job in jobs:
            self._checks.check(job, verify=verify)
        self.decode_checked(jobs, verify=verify)

    def decode_checked(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        """`decode`, of blocks that passed `JobChecks`."""
        for job in jobs:
            if not is_served(job.chain):
                self._decode_on_cpu(job, verify)
        self._decode_served([job for job in jobs if is_served(job.chain)], verify)

    def _decode_served(self, jobs: Sequence[DecodeJob], verify: str) -> None:
        for job in jobs:
            try:
                self._coders.check_decodable(job.chain.coder)
            except CheckpointError as error:
                error.path, error.fqn = job.path, job.fqn
                raise
        costs = self._costs(lambda: [self._decoder.cost_nbytes(job) for job in jobs], len(jobs))
        position, most = 0, len(jobs)
        while position < len(jobs):
            count = fitting(costs, position, most, self._budget_nbytes)
            batch = jobs[position : position + count]
            if not self._attempt(lambda: self._decoder.decode(batch, verify=verify)):  # noqa: B023
                if count > 1:
                    most = count // 2
                    continue
                self._fall_back(batch[0].chain)
                self._decode_on_cpu(batch[0], verify)
            position += count

    def session(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Copies between these tensors on the engine's own stream, complete at the end."""
        return self._device.session(tensors)

    def _costs(self, work: Callable[[], list[int]], count: int) -> list[int]:
        """Return the cost of each block; if nvCOMP can't even compute that, every block is a batch of its own."""
        costs: list[int] = []
        with self._device.current():
            known = self._attempt(lambda: costs.extend(work()))
        return costs if known else [self._budget_nbytes] * count

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do some work; return False if the GPU failed. All that it held is free again by then."""
        try:
            work()
        except CheckpointError:
            raise
        except _GPU_ERRORS as error:
            self._failure = f"{type(error).__name__}: {error}"
            return False
        return True

    def _fall_back(self, chain: CodecChain) -> None:
        """Before the CPU engine takes a block."""
        if chain.needs_gpu:
            raise CodecUnavailableError(
                f"The GPU could not run nvCOMP's ANS ({self._failure}), and nothing else can. Free GPU memory or lower "
                "device_memory_budget; codec='auto' has no such limit."
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The GPU failed on a block ({self._failure}); the CPU engine does its work, and that of every other "
                "block that fails. To keep the work on the GPU, lower device_memory_budget or free GPU memory.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _encode_on_cpu(self, job: EncodeJob, out: memoryview) -> EncodedBlock:
        host = np.empty(job.nbytes, np.uint8)

        def copy() -> None:
            position = 0
            for tensor in job.tensors:
                run = tensor.contiguous().reshape(-1).view(torch.uint8)
                self._device.copy_out(run, host[position : position + run.numel()].data)
                position += run.numel()

        self._copy(job.tensors, copy, () if job.ready is None else (job.ready,))
        return self._cpu.encode(host, job.chain, out)

    def _decode_on_cpu(self, job: DecodeJob, verify: str) -> None:
        host = np.empty(job.out.numel(), np.uint8)
        try:
            self._cpu.decode(job.data, job.row, job.chain, host, verify=verify)
        except CorruptDataError as error:
            raise CorruptDataError(error.message, path=job.path, fqn=job.fqn, byte_range=job.byte_range) from error
        self._copy([job.out], lambda: self._device.copy_in(host.data, job.out))

    def _copy(
        self, tensors: Sequence[Tensor], copy: Callable[[], None], after: Sequence[torch.cuda.Event] = ()
    ) -> None:
        try:
            with self._device.session(tensors, after):
                copy()
        except _GPU_ERRORS as error:
            earlier = f", after {self._failure}" if self._failure else ""
            raise CodecUnavailableError(
                f"The GPU can't even copy data ({error}{earlier}). Free GPU memory, or check the GPU with nvidia-smi."
            ) from error
