"""The GPU that is tried, or its stand-in on a CPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.gpu_acceptance.results import Skipped
from dcp_nvcomp.engines.cuda.device import CudaDevice, Device
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EnginePolicy

__all__ = ["MIB", "ROOT", "Host"]

T = TypeVar("T")

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Host:
    """The GPU or its stand-in.

    Attributes:
        stand_in: True for a CPU that stands in for the GPU.
    """

    stand_in: bool

    def pick(self, gpu: T, stand_in: T) -> T:
        """Return the first on a GPU, the second on the stand-in, which is small and slow."""
        return stand_in if self.stand_in else gpu

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.stand_in else torch.device("cuda", 0)

    def device(self, *, compiled: bool = False) -> Device:
        """Return the device, with a stream of its own.

        Args:
            compiled: True for the stand-in to run the kernels themselves, compiled as C++, in the place of their
                reference, which is faster.

        Raises:
            Skipped: there is no compiler for that.
        """
        if not self.stand_in:
            return CudaDevice(self.torch_device)
        from tests.engines.emulation.build import compiler
        from tests.engines.kernels_on_cpu import (
            ReferenceKernels,
            compile_for_cpu,
            compile_literals_for_cpu,
            compiled_kernels,
            emulated_launch,
        )
        from tests.engines.nvcomp_stand_in import StandInDevice
        from tests.engines.reference_literals import ReferenceLiterals

        if not compiled:
            return StandInDevice(ReferenceKernels(), literals=ReferenceLiterals())
        if compiler() is None:
            raise Skipped("there is no C++ compiler, with which a CPU could run the kernels")
        with self.scratch() as blocks, self.scratch() as literals:
            return StandInDevice(
                compiled_kernels(compile_for_cpu(blocks)),
                literals=emulated_launch(compile_literals_for_cpu(literals)),
            )

    def engine(self, device: Device, budget_nbytes: int) -> CudaEngine:
        """Return an engine on a device that `device` made, which does not check what it encodes."""
        return CudaEngine(device.torch_device, EnginePolicy(budget_nbytes, check_encodes=False), backend=device)

    def synchronize(self) -> None:
        """Wait for all work."""
        if not self.stand_in:
            torch.cuda.synchronize()

    def trouble(self) -> str | None:
        """Return what is wrong if the GPU can't be used any more by this process: CUDA's faults stay."""
        try:
            self.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    @contextmanager
    def files_in_memory(self, nbytes: int = 0) -> Iterator[Path]:
        """Make an empty directory for checkpoints, removed afterwards; on a disk if memory has no room for so much."""
        memory = Path("/dev/shm")
        has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > nbytes
        with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-acceptance-", dir=memory if has_room else None) as name:
            yield Path(name)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make an empty directory for all else, removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-acceptance-") as name:
            yield Path(name)
