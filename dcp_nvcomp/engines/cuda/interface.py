"""What saves and loads see of an engine for blocks of a GPU, whether that works on the GPU or leaves all to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dcp_nvcomp.codecs.encoded import EncodedBlock
from dcp_nvcomp.engines.cuda.decode import DecodeJob
from dcp_nvcomp.engines.cuda.encode import EncodeJob


@dataclass(frozen=True)
class EnginePolicy:
    """What a save or load asks of an engine."""

    device_memory_budget: int
    check_encodes: bool = True  # True if each batch that was encoded is decoded again
    may_fall_back: bool = True  # True if the CPU may take what the GPU fails at; else that is an error
    zstd: str = "auto"  # who codes Zstd, one of `options.CudaZstd`


class BlockEngine(Protocol):
    """What a save or load does with an engine for blocks of a GPU."""

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        """Encode blocks; see `CudaEngine.encode`."""

    def decode_checked(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        """Decode blocks that passed `JobChecks`; see `CudaEngine.decode`."""

    def scratch(self, jobs: Sequence[DecodeJob]) -> AbstractContextManager[Sequence[DecodeJob] | None]:
        """Lend memory for blocks that have no destination of their own; see `CudaEngine.scratch`."""

    def session(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Copies between these tensors, complete at the end."""
