"""literals*.cu encode, run thread by thread on a CPU; libzstd and the kernel decode it."""

from __future__ import annotations

import ctypes
import heapq
from collections import Counter

import numpy as np
import pytest
import torch

from dcp_nvcomp.codecs import CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.engines.cuda.decode import BatchDecoder
from dcp_nvcomp.engines.cuda.decode_jobs import Columns
from dcp_nvcomp.engines.cuda.encode import BatchEncoder, EncodeJob
from dcp_nvcomp.engines.cuda.literals import LiteralCoders, LiteralFrames, LiteralKernels
from tests.codecs import zstd_oracle
from tests.effort import THOROUGH

from .cases import cpu_encode, decoded, job, tensor, weights
from .literal_coding import CODER, GuardedArena, GuardedDevice, check, encode, libzstd, too_long
from .literal_slices import KIB, deep, exponent_planes, made_slice, skewed

# compiled where there is a C compiler
pytest.importorskip("dcp_nvcomp.codecs.coders._literals")

U8 = np.ndarray


def test_made_and_real_slices(device: GuardedDevice, coders: LiteralCoders, planes: list[U8]) -> None:
    random, frames, slices = np.random.default_rng(17), 0, 0
    for _ in range(200 if THOROUGH else 2):
        encoded = check(device, coders, [made_slice(random, planes) for _ in range(100)])
        assert too_long(encoded) == 0
        frames += len(encoded.framed().frames)
        slices += len(encoded.slices)
    assert slices // 2 < frames < slices


@pytest.mark.parametrize("nbytes", [32 * KIB, 128 * KIB])
def test_real_planes_whole(device: GuardedDevice, coders: LiteralCoders, nbytes: int) -> None:
    """All slices of each tensor's plane, in the type it has: no longer than the CPU encoder's frames."""
    for name, plane in exponent_planes().items():
        if "bfloat16" in name or "float32" in name:
            slices = [plane[start : start + nbytes] for start in range(0, plane.size, nbytes)]
            encoded = check(device, coders, slices[: len(slices) if THOROUGH else 2])
            assert too_long(encoded) == 0


def test_every_short_length(device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator) -> None:
    lengths = range(1, 700 if THOROUGH else 200)
    encoded = check(device, coders, [skewed(random, count, 3, 120, 8.0) for count in lengths])
    # as soon as the headers of 25 bytes leave something over, slices are framed
    assert not encoded.frames[25] and all(encoded.frames[60:])
    check(device, coders, [skewed(random, count, 140, 110, 1.1) for count in range(100, 1700, 16)])


def test_the_longest_slices(device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator) -> None:
    lengths = range(128 * KIB - (66 if THOROUGH else 5), 128 * KIB + 1)
    assert all(check(device, coders, [skewed(random, count, 30, 95, 1.3) for count in lengths]).frames)


@pytest.mark.parametrize("symbol", [0, 1, 127, 128, 255])
def test_one_symbol(device: GuardedDevice, coders: LiteralCoders, symbol: int) -> None:
    lengths = [1, 2, 13, 14, 15, 1000, 128 * KIB]
    encoded = check(device, coders, [np.full(count, symbol, np.uint8) for count in lengths])
    assert [len(frame) for frame in encoded.frames] == [0, 0, 0, 13, 13, 13, 13]


@pytest.mark.parametrize("pair", [(0, 1), (0, 255), (127, 128), (128, 129), (254, 255)])
def test_two_symbols(
    device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator, pair: tuple[int, int]
) -> None:
    data = np.array(pair, np.uint8)[random.integers(0, 2, 5000)]
    encoded = check(device, coders, [data])
    (block,) = zstd_oracle.blocks_of(encoded.frames[0])
    assert block.content == encoded.slices[0] and set(block.nbits.values()) == {1}
    assert len(encoded.frames[0]) < 5000 / 8 + 70


@pytest.mark.parametrize(
    ("first", "symbols", "how"),
    [(0, 2, "listed"), (90, 30, "fse"), (0, 128, "fse"), (1, 128, "fse"), (2, 128, "fse"), (0, 256, "fse")],
)
def test_weights(
    device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator, first: int, symbols: int, how: str
) -> None:
    """Lists end at the symbol 128; they are compressed where that is shorter too."""
    data = skewed(random, 20_000, symbols, first, 1.08)
    encoded = check(device, coders, [data])
    (block,) = zstd_oracle.blocks_of(encoded.frames[0])
    assert block.content == encoded.slices[0] and block.weights == how


def best_nbits(counts: list[int], limit: int) -> int:
    """Return how many bits the best code of at most `limit` bits takes: package-merge as in its paper."""
    leaves = sorted((count, (index,)) for index, count in enumerate(counts))
    items = leaves
    for _ in range(limit - 1):
        pairs = [(one[0] + two[0], one[1] + two[1]) for one, two in zip(items[::2], items[1::2], strict=False)]
        items = list(heapq.merge(leaves, pairs, key=lambda item: item[0]))
    lengths = Counter(index for _, members in items[: 2 * len(leaves) - 2] for index in members)
    assert max(lengths.values()) <= limit
    return sum(counts[index] * length for index, length in lengths.items())


def test_the_best_codes_under_the_limit(
    device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator
) -> None:
    made = [deep(random, symbols, 80) for symbols in range(8, 25)]
    made += [deep(random, symbols, 3, growth) for growth in (1.1, 1.3, 1.5, 2.0, 2.7) for symbols in (20, 60, 120)]
    made += [skewed(random, 50_000, symbols, 0, 1.02) for symbols in (100, 200, 256)]
    encoded = check(device, coders, made)
    limited = 0
    for data, frame in zip(encoded.slices, encoded.frames, strict=True):
        if frame and len(data) < 60_000:
            counts = Counter(data)
            (block,) = zstd_oracle.blocks_of(frame)
            best = best_nbits(sorted(counts.values()), 11)
            assert sum(counts[symbol] * nbits for symbol, nbits in block.nbits.items()) == best
            limited += best > best_nbits(sorted(counts.values()), 40)
    assert limited > 5, "the limit of 11 bits made no difference"


def test_codes_of_eleven_bits(device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator) -> None:
    encoded = check(device, coders, [deep(random, 20, 60)])
    (block,) = zstd_oracle.blocks_of(encoded.frames[0])
    assert max(block.nbits.values()) == 11 and block.content == encoded.slices[0]


def test_incompressible_slices_are_stored(
    device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator
) -> None:
    encoded = encode(device, coders, [random.integers(0, 256, count, np.uint8) for count in (1, 100, 5000, 128 * KIB)])
    assert encoded.frames == [b""] * 4


def test_equal_weights_of_many_symbols_are_stored(device: GuardedDevice, coders: LiteralCoders) -> None:
    """More than 128 weights that are all equal: finite state entropy can't tell them."""
    data = np.concatenate([np.repeat(np.arange(192, dtype=np.uint8), 10), np.full(640, 192, np.uint8)])
    assert check(device, coders, [data]).frames == [b""]


# ---- the interface ----


def test_what_it_serves(coders: LiteralCoders) -> None:
    assert coders.encodes(CODER)
    for coder in (None, Deflate(), Zstd(), Zstd(256 * KIB, literals_only=True)):
        assert not coders.encodes(coder)


def test_the_memory_that_it_says_it_takes(
    literals_library: ctypes.CDLL, random: np.random.Generator, planes: list[U8]
) -> None:
    device = GuardedDevice(literals_library)
    coders = LiteralCoders(device)
    slices = [made_slice(random, planes) for _ in range(50)]
    lengths = np.array([data.size for data in slices], np.int64)
    scratch = device.arena.empty(int(lengths.sum()) + 16 * lengths.size)
    assert isinstance(device.arena, GuardedArena)
    device.arena.given_nbytes = 0
    with device.session([]):
        coders.encode(CODER, scratch, 16 * (np.cumsum(lengths // 16 + 1) - lengths // 16 - 1), lengths).nbytes()
    # from the arena; and the tables, which are torch's
    assert device.arena.given_nbytes + 50 * (16 + 4 + 8) == coders.encode_nbytes(CODER, lengths)


def test_impossible_lengths_are_an_error(device: GuardedDevice) -> None:
    for nbytes in (0, 11, -5):
        nothing, found = torch.empty(16), torch.tensor([nbytes], dtype=torch.int32)
        lengths = np.array([10], np.int64)
        frames = LiteralFrames(device, LiteralKernels(lambda *_: None), lengths, nothing, nothing, found)
        with pytest.raises(RuntimeError, match="impossible lengths"):
            frames.nbytes()


@pytest.mark.parametrize("lie", [-1, 1, -100])
def test_a_frame_whose_length_arrived_wrong_is_not_written(
    device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator, lie: int
) -> None:
    """What lies beside the room that it was given may be training's."""
    slices = [skewed(random, 5000, 30, 95, 1.3), np.full(3000, 7, np.uint8), skewed(random, 4000, 9, 95, 1.3)]
    lengths = np.array([data.size for data in slices], np.int64)
    starts = np.array([0, 5008, 8016])
    scratch = device.arena.empty(12016)
    for data, start in zip(slices, starts.tolist(), strict=True):
        scratch[start : start + data.size] = torch.from_numpy(data)
    with device.session([]):
        frames = coders.encode(CODER, scratch, starts, lengths)
        right = frames.nbytes().copy()
        frames.nbytes()[:2] += lie
        memory = device.arena.empty(12288)
        frames.write(np.array([0, 4096, 8192]) + memory.data_ptr())
    device.check()
    written = memory.numpy()
    assert (written[: 2 * 4096] == 0xA5).all(), "the first two are not written"
    assert libzstd(written[8192 : 8192 + right[2]].tobytes()) == slices[2].tobytes()


@pytest.mark.parametrize("width", [2, 4, 8])
def test_batches_of_blocks(literals_library: ctypes.CDLL, width: int) -> None:
    """The CPU engine reads what is encoded, and what the CPU engine encoded is decoded."""
    device = GuardedDevice(literals_library)
    coders, chain = LiteralCoders(device), CodecChain(Planes(width), Zstd(4 * KIB, literals_only=True))
    blocks = [weights(width, count, seed=count) for count in (1, 7, 4096, 30_000)]
    jobs = [EncodeJob((tensor(block),), chain) for block in blocks]
    out = memoryview(bytearray(sum(chain.max_encoded_nbytes(block.size) for block in blocks)))
    encoder = BatchEncoder(device, coders, decoder := BatchDecoder(device, coders))
    encoded = encoder.encode(jobs, out)
    assert not encoded.wrong
    assert min(encoder.costs_nbytes(jobs)) > 0
    for block, mine in zip(blocks, encoded.run, strict=True):
        theirs = cpu_encode(block, chain)
        assert decoded(mine, chain) == block.tobytes()
        assert mine.data.nbytes <= theirs.data.nbytes
        from_cpu, from_gpu = job(theirs, chain), job(mine, chain)
        # small slices of the CPU engine are libzstd's
        which = [from_gpu] if block.size < 100_000 else [from_gpu, from_cpu]
        assert not decoder.decode(which, Columns.of(which))
        assert all(own.out.numpy().tobytes() == block.tobytes() for own in which)
