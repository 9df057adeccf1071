"""What saves and loads ask of an engine for blocks of a GPU, and the CPU engine in its place.

FallBack        before the CPU engine does a GPU's work: a warning, or, where the CPU may not or can't, an error
CopyingEngine   blocks of a GPU through the CPU engine. It uses nothing but torch's own copies on a stream of the
                calling thread, so that whatever is wrong with nvCOMP, CuPy or the kernels does not matter here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import U8, CodecChain, EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.decode_jobs import Columns, DecodeJob, Work, singles_of
from dcp_nvcomp.engines.cuda.encode import EncodeJob
from dcp_nvcomp.engines.cuda.health import DeviceHealth
from dcp_nvcomp.engines.cuda.slice_coders import refusal_of
from dcp_nvcomp.engines.cuda.streams import stream_beside
from dcp_nvcomp.engines.tensors import host_copy
from dcp_nvcomp.errors import CheckpointError, CodecUnavailableError, CorruptDataError


@dataclass(frozen=True)
class EnginePolicy:
    """What a save or load asks of an engine."""

    device_memory_budget: int
    check_encodes: bool = True  # True if each batch that was encoded is decoded again
    may_fall_back: bool = True  # True if the CPU may take what the GPU fails at; else that is an error


class FallBack:
    """What one save or load allows. Each method raises CodecUnavailableError if that rules the CPU engine out."""

    def __init__(self, health: DeviceHealth, policy: EnginePolicy) -> None:
        self._health = health
        self._policy = policy

    def of_everything(self, reason: str) -> None:
        """The GPU is not used any more."""
        if not self._policy.may_fall_back:
            raise CodecUnavailableError(f"engine='cuda' can't go on: {reason}. Use engine='auto' or 'cpu'.")
        self._health.fell_back(reason)

    def of_chain(self, chain: CodecChain, direction: str) -> None:
        """The GPU does not take a block of this chain: be it that it never does, or that its self-test failed."""
        refusal = refusal_of(self._health, chain, direction)
        if refusal is not None:
            if not self._policy.may_fall_back:
                raise CodecUnavailableError(f"engine='cuda' can't run here: {refusal}. Use engine='auto' or 'cpu'.")
            self._health.left_out(chain, refusal)

    def of_block(self, chain: CodecChain, reason: str) -> None:
        """A block failed alone. One that needs a GPU is left to `CopyingEngine`, which raises."""
        if not self._policy.may_fall_back and not chain.needs_gpu:
            raise CodecUnavailableError(
                f"The GPU failed on a block ({reason}), and engine='cuda' rules the CPU engine out."
            )
        if not chain.needs_gpu:
            self._health.failed(reason)

    def of_wrong_block(self, chain: CodecChain) -> None:
        """A block was encoded to wrong bytes; with any policy the CPU makes it right, if it can."""
        if chain.needs_gpu:
            raise CodecUnavailableError(
                f"The GPU encoded a block to wrong bytes ({self._health.name}), which was found before they were "
                "written, and only a GPU runs nvCOMP's ANS. Save with codec='auto', of which the CPU engine does again "
                "what comes out wrong, and report this, with the versions of nvCOMP and of the driver."
            )


class CopyingEngine:
    """Encodes and decodes blocks of any device on the CPU. Not for several threads at once."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self._cpu = CpuEngine()

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        encoded: list[EncodedBlock] = []
        position = 0
        for job in jobs:
            for at in range(job.count):
                encoded.append(self.encode_block(job.single(at), out[position:]))
                position += encoded[-1].data.nbytes
        return encoded

    encode_checked = encode

    def put_right(
        self, jobs: Sequence[EncodeJob], encoded: Sequence[EncodedBlock], out: memoryview, policy: EnginePolicy
    ) -> Sequence[EncodedBlock]:
        """As `CudaEngine.put_right`: nothing can be wrong here."""
        return encoded

    def encode_block(self, job: EncodeJob, out: memoryview) -> EncodedBlock:
        """Encode a job of one block to the start of `out`."""
        self._check(job.chain)
        device = job.tensors[0].device
        with self._copies(device), nullcontext() if job.ready is None else stream_beside(device, job.ready):
            host = to_host(job.tensors)
        return self._cpu.encode(host, job.chain, out)

    def decode_checked(self, works: Sequence[Work], *, verify: str, columns: Columns | None = None) -> None:
        for job in singles_of(works):
            self.place(self.decoded(job, verify=verify), job)

    def decoded(self, job: DecodeJob, *, verify: str) -> U8:
        """Return a decoded block in host memory; with `verify="off"` the stored bytes are verified, as on a GPU."""
        self._check(job.chain)
        verify = "stored" if verify == "off" else verify
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
    runs = [host_copy(tensor).reshape(-1).view(torch.uint8) for tensor in tensors]
    host: U8 = (runs[0] if len(runs) == 1 else torch.cat(runs)).numpy()
    return host


def to_device(host: U8, out: Tensor) -> None:
    """Copy bytes to a tensor."""
    out.copy_(torch.from_numpy(host))
