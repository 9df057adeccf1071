"""The CUDA engine (being written)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.engines.base import BlockRow, EncodedBlock


def cuda_unavailable_reason() -> str | None:
    return "no CUDA device" if not torch.cuda.is_available() else "not written yet"


def nvcomp_version() -> str:
    return ""


@dataclass(frozen=True)
class DecodeJob:
    data: memoryview
    row: BlockRow
    chain: CodecChain
    out: torch.Tensor


class CudaEngine:
    def __init__(self, device: torch.device, *, device_memory_budget: int) -> None:
        raise NotImplementedError

    def encode(self, blocks: Sequence[torch.Tensor], chain: CodecChain, out: memoryview) -> list[EncodedBlock]:
        raise NotImplementedError

    def decode(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        raise NotImplementedError
