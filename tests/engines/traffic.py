"""Counts what a batch costs: bytes through a GPU's memory, launches, and how often the host waits.

The engine runs on the stand-in, and every kernel's table says what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs import CodecChain, Planes, Zstd
from dcp_nvcomp.engines.cuda.batches import RowTable
from dcp_nvcomp.engines.cuda.engine import CudaEngine, DecodeJob, EncodeJob, EnginePolicy

from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import StandInDevice
from .reference_literals import ReferenceLiterals

__all__ = ["Traffic", "traffic"]

_BLOCK_NBYTES, _BLOCKS = 1 << 20, 4
# The least that a GPU's memory moves at a time.
_SECTOR_NBYTES = 32


@dataclass
class Traffic:
    """What a batch of blocks cost.

    Attributes:
        read: bytes read from device memory for each byte of the blocks.
        written: bytes written to it.
        launches: of kernels.
        waits: how often the host waits for the device.
    """

    read: float = 0
    written: float = 0
    launches: int = 0
    waits: int = 0

    def moved(self, read_nbytes: int, written_nbytes: int) -> None:
        """Count bytes that were read and written."""
        self.read += read_nbytes / (_BLOCKS * _BLOCK_NBYTES)
        self.written += written_nbytes / (_BLOCKS * _BLOCK_NBYTES)


class _Kernels(ReferenceKernels):
    def __init__(self, count: Traffic) -> None:
        self._count = count

    def _launched(self, table: RowTable, read_nbytes: int, written_nbytes: int) -> None:
        self._count.launches += table.tiles.size > 0
        self._count.moved(read_nbytes, written_nbytes)

    def inspect(self, blocks: RowTable, crc: Tensor, seen: Tensor) -> None:
        self._launched(blocks, int(blocks.rows[:, 1].sum()), 0)
        super().inspect(blocks, crc, seen)

    def split(self, blocks: RowTable, seen: Tensor, flags: Tensor) -> None:
        super().split(blocks, seen, flags)
        self._launched(blocks, int(blocks.rows[:, 1].sum()), self._planes_nbytes(blocks, flags.tolist()))

    def merge(self, blocks: RowTable) -> None:
        self._launched(blocks, self._planes_nbytes(blocks, blocks.rows[:, 3].tolist()), int(blocks.rows[:, 1].sum()))
        super().merge(blocks)

    def copy(self, pieces: RowTable) -> None:
        nbytes, zeros = int(pieces.rows[:, 2].sum()), int(pieces.rows[:, 3].sum())
        self._launched(pieces, nbytes, nbytes + zeros)
        super().copy(pieces)

    @staticmethod
    def _planes_nbytes(blocks: RowTable, flags: Sequence[int]) -> int:
        rows = zip(blocks.rows.tolist(), flags, strict=True)
        planes = [Planes(row[2]).layout(row[1], flag, True) for row, flag in rows]
        return sum(plane.nbytes for block in planes for plane in block)


class _Literals(ReferenceLiterals):
    def __init__(self, count: Traffic) -> None:
        super().__init__()
        self._count = count

    def __call__(self, name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        super().__call__(name, blocks, arguments)
        self._count.launches += 1
        self._count.moved(*self.moved)


class _Device(StandInDevice):
    def __init__(self, count: Traffic) -> None:
        self._count = count
        super().__init__(_Kernels(count), literals=_Literals(count))

    @contextmanager
    def session(self, tensors: Sequence[Tensor], after: Sequence[Any] = ()) -> Iterator[None]:
        with super().session(tensors, after):
            yield
        self._count.waits += 1

    def copy_in(self, host: memoryview, target: Tensor) -> None:
        super().copy_in(host, target)
        self._count.moved(0, host.nbytes)

    def copy_out(self, source: Tensor, host: memoryview) -> None:
        super().copy_out(source, host)
        self._count.moved(source.numel(), 0)


@contextmanager
def _counted_torch(count: Traffic) -> Iterator[None]:
    """Count what the engine does with tensors itself: it brings results to the host, and spoils memory."""
    cpu, invert = Tensor.cpu, Tensor.bitwise_not_

    def counted_cpu(self: Tensor) -> Tensor:
        count.waits += 1
        return cpu(self)

    def counted_invert(self: Tensor) -> Tensor:
        nbytes = self.numel() * min(self.stride(0), _SECTOR_NBYTES)
        count.moved(nbytes, nbytes)
        return invert(self)

    with patch.object(Tensor, "cpu", counted_cpu), patch.object(Tensor, "bitwise_not_", counted_invert):
        yield


def _weights() -> Tensor:
    values = np.random.default_rng(0).normal(0, 0.02, _BLOCKS * _BLOCK_NBYTES // 2).astype(np.float32)
    return torch.from_numpy((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))


def traffic(*, check_encodes: bool) -> tuple[Traffic, Traffic]:
    """Encode and decode a batch of bfloat16 weights under `planes-zstd`; return what each cost."""
    chain, count = CodecChain(Planes(2), Zstd(literals_only=True)), Traffic()
    policy = EnginePolicy(1 << 30, check_encodes=check_encodes)
    engine = CudaEngine(torch.device("cpu"), policy, backend=_Device(count))
    blocks = [block.contiguous() for block in _weights().chunk(_BLOCKS)]
    out = memoryview(bytearray(_BLOCKS * chain.max_encoded_nbytes(_BLOCK_NBYTES)))
    with _counted_torch(count):
        encoded = engine.encode([EncodeJob((block,), chain) for block in blocks], out)
        encoding, decoding = Traffic(**vars(count)), count
        vars(decoding).update(vars(Traffic()))
        results = [torch.zeros_like(block) for block in blocks]
        jobs = [DecodeJob(one.data, one.row, chain, result) for one, result in zip(encoded, results, strict=True)]
        engine.decode(jobs, verify="stored")
    assert all(torch.equal(*pair) for pair in zip(results, blocks, strict=True))
    return encoding, decoding
