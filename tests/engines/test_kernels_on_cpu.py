"""blocks.cu itself, compiled as C++ and run thread by thread on a CPU, against the reference. No GPU needed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs.transforms import PLANE_NAMES, Planes
from dcp_nvcomp.engines.cuda.batches import TILE_NBYTES, block_table, copy_table
from dcp_nvcomp.engines.cuda.device import LaunchedKernels, power_table, stride_table
from tests.codecs import planes_reference
from tests.effort import examples

from .cases import SIGNS, floats
from .kernels_on_cpu import compiled_kernels
from .literal_coding import GuardPages

CANARY = 0x5C


@pytest.fixture(scope="module")
def launched(compiled_library: ctypes.CDLL) -> LaunchedKernels:
    return compiled_kernels(compiled_library)


class Memory:
    """Bytes at a given distance from a multiple of 64, between canaries."""

    def __init__(self, nbytes: int, misaligned: int = 0) -> None:
        self._all = np.full(nbytes + 256, CANARY, np.uint8)
        self._start = 64 - self._all.ctypes.data % 64 + misaligned
        self.bytes = self._all[self._start : self._start + nbytes]
        self.address = self._all.ctypes.data + self._start

    def check(self) -> None:
        """Nobody wrote outside."""
        assert (self._all[: self._start] == CANARY).all()
        assert (self._all[self._start + self.bytes.size :] == CANARY).all()


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def results(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


# Lengths around a quad, an eighth, a word and a tile.
AROUND_TILES = [TILE_NBYTES // 8, TILE_NBYTES // 4 + 1, TILE_NBYTES // 2 + 9, TILE_NBYTES]
counts = st.integers(1, 70) | st.sampled_from(AROUND_TILES)


@settings(max_examples=examples(60), deadline=None)
@given(
    width=st.sampled_from([2, 4, 8]),
    blocks=st.lists(
        st.tuples(counts, st.sampled_from(SIGNS), st.integers(0, 16), st.booleans()), min_size=1, max_size=3
    ),
    seed=st.integers(0, 1 << 30),
)
def test_split_and_merge(
    launched: LaunchedKernels, width: int, blocks: list[tuple[int, str, int, bool]], seed: int
) -> None:
    codec, sources, planes, rows = Planes(width), [], [], []
    for number, (count, signs, misaligned, pack) in enumerate(blocks):
        source = Memory(count * width, misaligned)
        source.bytes[:] = floats(width, count, signs, seed + number)
        sources.append(source)
        flags, expected = planes_reference.split(torch.from_numpy(source.bytes), codec, pack=pack)
        planes.append({name: Memory(plane.numel()) for name, plane in expected.items()})
        rows.append((flags, expected, pack))
    data = column(*(source.address for source in sources))
    nbytes = column(*(source.bytes.size for source in sources))
    addresses = np.array([[own[n].address if n in own else 0 for n in PLANE_NAMES] for own in planes], np.int64)
    widths = np.full_like(nbytes, width)
    crc, seen, flags_out = results(len(blocks)), results(len(blocks)), results(len(blocks))

    table = block_table(data, nbytes, widths, column(*(pack for _, _, pack in rows)), addresses)
    launched.inspect(table, crc, seen)
    launched.split(table, seen, flags_out)

    for index, (flags, expected, _) in enumerate(rows):
        assert crc.numpy().view(np.uint32)[index] == crc32c(sources[index].bytes.tobytes())
        assert flags_out[index] == flags
        for name, plane in expected.items():
            assert planes[index][name].bytes.tobytes() == plane.numpy().tobytes(), name
            planes[index][name].check()

    merged = [Memory(source.bytes.size, blocks[index][2]) for index, source in enumerate(sources)]
    out = column(*(memory.address for memory in merged))
    launched.merge(block_table(out, nbytes, widths, column(*(flags for flags, _, _ in rows)), addresses))
    for source, memory in zip(sources, merged, strict=True):
        assert memory.bytes.tobytes() == source.bytes.tobytes()
        memory.check()


@settings(max_examples=examples(60), deadline=None)
@given(
    runs=st.lists(
        st.tuples(
            st.integers(0, 100) | st.sampled_from([TILE_NBYTES - 1, TILE_NBYTES, TILE_NBYTES + 5, 3 * TILE_NBYTES]),
            st.integers(0, 16),
            st.integers(0, 16),
            st.integers(0, 31),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1 << 30),
)
def test_copy(launched: LaunchedKernels, runs: list[tuple[int, int, int, int]], seed: int) -> None:
    sources = [Memory(nbytes, misaligned) for nbytes, misaligned, _, _ in runs]
    targets = [Memory(nbytes + zeros, misaligned) for nbytes, _, misaligned, zeros in runs]
    for source in sources:
        source.bytes[:] = np.random.default_rng(seed).integers(0, 256, source.bytes.size, np.uint8)
    launched.copy(
        copy_table(
            column(*(source.address for source in sources)),
            column(*(target.address for target in targets)),
            column(*(run[0] for run in runs)),
            column(*(run[3] for run in runs)),
        )
    )
    for (_, _, _, zeros), source, target in zip(runs, sources, targets, strict=True):
        assert target.bytes.tobytes() == source.bytes.tobytes() + bytes(zeros)
        target.check()


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 1024, 1027, TILE_NBYTES + 4, 3 * TILE_NBYTES + 2])
@pytest.mark.parametrize("misaligned", [0, 1, 2, 4])
def test_crc_of_plain_bytes(launched: LaunchedKernels, nbytes: int, misaligned: int) -> None:
    block = Memory(nbytes, misaligned)
    block.bytes[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    crc, seen = results(1), results(1)
    table = block_table(column(block.address), column(nbytes), column(1), column(0), np.zeros((1, 3), np.int64))
    launched.inspect(table, crc, seen)
    assert crc.numpy().view(np.uint32)[0] == crc32c(block.bytes.tobytes())
    assert seen[0] == 0


@pytest.mark.parametrize("nbytes", [1, 1023, 1024, 65536, (1 << 26) + 12345])
def test_crc_tables_append_zeros(nbytes: int) -> None:
    register = crc32c(b"some bytes") ^ 0xFFFFFFFF
    stride = stride_table(nbytes)
    found = 0
    for k in range(4):
        found ^= int(stride[k, register >> 8 * k & 0xFF])
    zeros = memoryview(bytes(nbytes))
    assert found ^ 0xFFFFFFFF == crc32c(zeros, crc32c(b"some bytes"))
    assert power_table()[0, 0] == 1 << 31


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 33, 1000, TILE_NBYTES // 2 + 3])
@pytest.mark.parametrize("signs", SIGNS)
def test_no_byte_is_read_or_written_behind_the_end(
    launched: LaunchedKernels, width: int, count: int, signs: str
) -> None:
    guarded, nbytes = GuardPages().allocate, count * width
    codec, block = Planes(width), guarded(nbytes)
    block[:] = floats(width, count, signs, count)
    flags, expected = planes_reference.split(torch.from_numpy(block), codec, pack=True)
    planes = {name: guarded(-(-plane.numel() // 16) * 16) for name, plane in expected.items()}
    # a plane whose length is no multiple of 16 can't end at the guard and begin aligned: give it its 16 bytes of room
    addresses = np.array([[planes[n].ctypes.data if n in planes else 0 for n in PLANE_NAMES]], np.int64)
    crc, seen, flags_out = results(1), results(1), results(1)
    table = block_table(column(block.ctypes.data), column(nbytes), column(width), column(1), addresses)
    launched.inspect(table, crc, seen)
    launched.split(table, seen, flags_out)
    assert flags_out[0] == flags
    out, copied = guarded(nbytes), guarded(nbytes)
    launched.merge(block_table(column(out.ctypes.data), column(nbytes), column(width), column(flags), addresses))
    launched.copy(copy_table(column(out.ctypes.data), column(copied.ctypes.data), column(nbytes), column(0)))
    assert copied.tobytes() == block.tobytes()
