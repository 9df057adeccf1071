"""The encode check, and what earlier batches left in device memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.arena import Arena
from dcp_nvcomp.engines.cuda.batches import RowTable

from .cases import CHAIN, OWN, encode, engine_on, tensor, weights
from .kernels_on_cpu import ReferenceKernels, _memory
from .nvcomp_stand_in import StandInDevice

BLOCKS = [weights(4, 2500, seed=seed) for seed in range(3)] + [weights(4, 20)]


class TwoFaults(ReferenceKernels):
    """Once `begun`: planes get a bit wrong, and one of the kernels that put blocks together does nothing.

    Args:
        idle: `"merge"`, or `"copy"`, which then copies nothing any more once the blocks were gathered.
    """

    def __init__(self, idle: str) -> None:
        self._idle = idle
        self.begun = False
        self._copies = 0

    def split(self, blocks: RowTable, seen: torch.Tensor, flags: torch.Tensor) -> None:
        super().split(blocks, seen, flags)
        if self.begun:
            for row in blocks.rows.tolist():
                _memory(row[5], 1).bitwise_xor_(4)

    def merge(self, blocks: RowTable) -> None:
        if not (self.begun and self._idle == "merge"):
            super().merge(blocks)

    def copy(self, pieces: RowTable) -> None:
        self._copies += self.begun
        if not (self.begun and self._idle == "copy" and self._copies > 1):
            super().copy(pieces)
            if self.begun and self._idle == "copy":
                for row in pieces.rows.tolist():
                    _memory(row[1], 1).bitwise_xor_(4)


def on_plain_memory(kernels: ReferenceKernels, capacity_nbytes: int = 1 << 40) -> StandInDevice:
    """A device whose arena keeps what lay there: a GPU's does."""
    device = StandInDevice(kernels, capacity_nbytes=capacity_nbytes)
    device.arena = Arena(device._reserve)
    device.nvcomp_memory.attach(device.stream_handle, device.arena)
    return device


def decoded(encoded: EncodedBlock, chain: CodecChain) -> bytes:
    out = np.empty(encoded.uncompressed_nbytes, np.uint8)
    CpuEngine().decode(encoded.data, encoded.row, chain, out, verify="full")
    return out.tobytes()


@pytest.mark.parametrize(("idle", "chain"), [("merge", CHAIN), ("merge", OWN), ("copy", CodecChain(Bytes()))])
@pytest.mark.parametrize("block", BLOCKS[2:], ids=["10 KB", "80 bytes"])
def test_idle_kernels_do_not_pass_where_the_block_was_before(idle: str, chain: CodecChain, block: np.ndarray) -> None:
    kernels = TwoFaults(idle)
    engine = engine_on(on_plain_memory(kernels))
    for _ in range(2):
        (one,) = encode(engine, [tensor(block)], chain)
        assert not one.was_wrong
    kernels.begun = True
    with pytest.warns(RuntimeWarning, match="encoded blocks to wrong bytes"):
        (one,) = encode(engine, [tensor(block)], chain)
    assert one.was_wrong and decoded(one, chain) == block.tobytes()


@pytest.mark.parametrize("chain", [CHAIN, OWN, CodecChain(Bytes(), Deflate(1024))])
def test_the_memory_of_the_check_is_held(chain: CodecChain) -> None:
    """NvCOMP's own memory must not overlap it."""
    engine = engine_on(StandInDevice(ReferenceKernels()))
    for block in BLOCKS:
        (one,) = encode(engine, [tensor(block)], chain)  # a warning would be an error
        assert decoded(one, chain) == block.tobytes()
