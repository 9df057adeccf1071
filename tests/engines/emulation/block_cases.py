"""The kernels of blocks.cu on blocks of all kinds, a few kilobytes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c

from dcp_nvcomp.codecs.transforms import PLANE_NAMES, Planes
from dcp_nvcomp.engines.cuda.batches import THREADS, RowTable, block_table, copy_table
from dcp_nvcomp.engines.cuda.device import Launch, power_table, stride_table
from tests.codecs import planes_reference

from ..cases import floats
from .memory import SharedMemory, expect

__all__ = ["check_blocks"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Block:
    width: int
    count: int
    signs: str
    misaligned: int


# One thread block a launch first and three at most, as each takes 300 MB and its time. One row is of two tiles.
_BATCHES = (
    (_Block(4, 1_003, "mixed", 2),),
    (_Block(2, 33_000, "positive", 0),),
    (_Block(8, 403, "negative", 4), _Block(4, 1_029, "positive", 0), _Block(2, 77, "mixed", 1)),
    (_Block(8, 301, "mixed", 1), _Block(2, 1_500, "negative", 2), _Block(8, 401, "positive", 0)),
)

# Lengths, zero bytes after them, and how misaligned sources and the common target are.
_COPIES = (
    (((66_000, 16, 0), (50, 14, 1)), 0),
    (((4_099, 13, 2), (31, 1, 4), (5_000, 8, 0)), 0),
    (((301, 2, 0), (7, 0, 1), (300, 3, 5)), 3),
)


def check_blocks(memory: SharedMemory, launch: Launch) -> None:
    """Run all of them, and compare with the reference."""
    for batch in _BATCHES:
        memory.clear()
        _check_planes(batch, memory, launch)
    for copies, misaligned in _COPIES:
        memory.clear()
        _check_copies(copies, misaligned, memory, launch)


def _column(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def _addresses(memories: Sequence[Bytes]) -> npt.NDArray[np.int64]:
    return _column([memory.ctypes.data for memory in memories])


def _check_planes(batch: Sequence[_Block], memory: SharedMemory, launch: Launch) -> None:
    data = [floats(b.width, b.count, b.signs, b.count) for b in batch]
    blocks = [memory.put(values, block.misaligned) for block, values in zip(batch, data, strict=True)]
    expected = [
        planes_reference.split(torch.from_numpy(values), Planes(block.width), pack=True)
        for block, values in zip(batch, data, strict=True)
    ]
    planes = [{name: memory.empty(plane.numel()) for name, plane in own.items()} for _, own in expected]
    nbytes, widths = _column([values.size for values in data]), _column([block.width for block in batch])
    plane_addresses = np.stack(
        [_addresses([own.get(name, own["rest"]) for own in planes]) for name in PLANE_NAMES], axis=1
    )

    def table(addresses: npt.NDArray[np.int64], flags: Sequence[int]) -> tuple[int, Bytes, Bytes]:
        return _put_table(memory, block_table(addresses, nbytes, widths, _column(flags), plane_addresses))

    grid, rows, tiles = table(_addresses(blocks), [1] * len(batch))
    crc, seen, flags = (memory.empty(4 * len(batch)) for _ in range(3))
    crc_tables = memory.put(stride_table(4 * THREADS)), memory.put(power_table())
    launch("inspect_blocks", grid, _words(rows, tiles, *crc_tables, crc, seen))
    launch("split_blocks", grid, _words(rows, tiles, seen, flags))
    expect("crc", crc, np.array([crc32c(values.tobytes()) for values in data], np.uint32).tobytes())
    expect("flags", flags, np.array([own for own, _ in expected], np.uint32).tobytes())
    for found, (_, own) in zip(planes, expected, strict=True):
        for name, plane in own.items():
            expect(name, found[name], plane.numpy().tobytes())
    merged = [memory.empty(values.size, block.misaligned) for block, values in zip(batch, data, strict=True)]
    grid, rows, tiles = table(_addresses(merged), [own for own, _ in expected])
    launch("merge_blocks", grid, _words(rows, tiles))
    for found_block, values in zip(merged, data, strict=True):
        expect("merged", found_block, values.tobytes())


def _check_copies(
    copies: Sequence[tuple[int, int, int]], misaligned: int, memory: SharedMemory, launch: Launch
) -> None:
    data = [np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8) for nbytes, _, _ in copies]
    sources = [memory.put(values, at) for values, (_, _, at) in zip(data, copies, strict=True)]
    lengths = _column([nbytes + zeros for nbytes, zeros, _ in copies])
    target = memory.empty(int(lengths.sum()), misaligned)  # one after the other, as gathered pieces are
    table = copy_table(
        _addresses(sources),
        target.ctypes.data + np.cumsum(lengths) - lengths,
        _column([nbytes for nbytes, _, _ in copies]),
        _column([zeros for _, zeros, _ in copies]),
    )
    grid, rows, tiles = _put_table(memory, table)
    launch("copy_pieces", grid, _words(rows, tiles))
    zeros = (bytes(zeros) for _, zeros, _ in copies)
    expect("copied", target, b"".join(values.tobytes() + after for values, after in zip(data, zeros, strict=True)))


def _words(*memories: Bytes) -> tuple[int, ...]:
    return tuple(memory.ctypes.data for memory in memories)


def _put_table(memory: SharedMemory, table: RowTable) -> tuple[int, Bytes, Bytes]:
    return table.tiles.size, memory.put(table.rows), memory.put(table.tiles)
