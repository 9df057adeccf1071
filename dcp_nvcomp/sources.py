"""What a save reads from: a shard's elements, block by block, and the engine that encodes them where they are.

HostSource          host memory, CPU engine
AcceleratorSource   memory of a device, CPU engine: each block is copied to the host
CudaSource          memory of a CUDA device, CUDA engine, many blocks at once
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dcp_nvcomp.blocks import Box
from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.planes import SplitScratch
from dcp_nvcomp.engines.base import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda import CudaEngine, EncodeJob
from dcp_nvcomp.placement import HostArray, block_bytes, device_block

__all__ = ["AcceleratorSource", "CudaSource", "HostSource", "Source", "Workbench"]


class Workbench:
    """What an encoding thread keeps from task to task: engines and scratch memory.

    Args:
        device_memory_budget: what CUDA engines may take on each device, in bytes.
    """

    def __init__(self, device_memory_budget: int) -> None:
        self.cpu = CpuEngine()
        self.scratch = SplitScratch()
        self._device_memory_budget = device_memory_budget
        self._cuda: dict[torch.device, CudaEngine] = {}

    def cuda(self, device: torch.device) -> CudaEngine:
        """The engine of a device, made when first needed."""
        engine = self._cuda.get(device)
        if engine is None:
            engine = self._cuda[device] = CudaEngine(device, device_memory_budget=self._device_memory_budget)
        return engine


class Source(ABC):
    """A shard's elements."""

    on_cuda_engine = False

    @abstractmethod
    def encode(self, boxes: Sequence[Box], chain: CodecChain, out: memoryview, bench: Workbench) -> list[EncodedBlock]:
        """Encode some blocks of the shard into `out`, one after the other."""


@dataclass(frozen=True)
class HostSource(Source):
    """A shard in host memory."""

    array: HostArray

    def encode(self, boxes: Sequence[Box], chain: CodecChain, out: memoryview, bench: Workbench) -> list[EncodedBlock]:
        blocks, position = [], 0
        for box in boxes:
            block = bench.cpu.encode(block_bytes(self.array, box, bench.scratch), chain, out[position:])
            position += len(block.data)
            blocks.append(block)
        return blocks


def _ready_event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


@dataclass(frozen=True)
class _DeviceSource(Source):
    """A shard on a device. Must be made on the caller's thread: work that the caller has queued there comes first."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", _ready_event(self.tensor))

    def _wait(self) -> None:
        # other threads have a current stream of their own, which knows nothing of the caller's
        if self.ready is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.ready)


@dataclass(frozen=True)
class AcceleratorSource(_DeviceSource):
    """A shard on any device, encoded on the CPU."""

    def encode(self, boxes: Sequence[Box], chain: CodecChain, out: memoryview, bench: Workbench) -> list[EncodedBlock]:
        self._wait()
        blocks, position = [], 0
        for box in boxes:
            data = device_block(self.tensor, box).cpu().numpy()
            assert data.dtype == np.uint8
            block = bench.cpu.encode(data, chain, out[position:])
            position += len(block.data)
            blocks.append(block)
        return blocks


@dataclass(frozen=True)
class CudaSource(_DeviceSource):
    """A shard on a CUDA device, encoded there."""

    on_cuda_engine = True

    def encode(self, boxes: Sequence[Box], chain: CodecChain, out: memoryview, bench: Workbench) -> list[EncodedBlock]:
        with torch.cuda.device(self.tensor.device):
            self._wait()
            jobs = [EncodeJob((device_block(self.tensor, box),), chain) for box in boxes]
            return bench.cuda(self.tensor.device).encode(jobs, out)
