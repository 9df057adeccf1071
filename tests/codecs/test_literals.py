"""The compiled encoder of literals-only zstd frames: whatever it is given, two decoders must give it back.

Slices of each length, alphabet and skew, and how short their frames are, are in test_literals_golden.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Zstd, coders
from tests.codecs.zstd_oracle import Block, blocks_of
from tests.effort import examples

# compiled where there is a C compiler
encode_literals = pytest.importorskip("dcp_nvcomp.codecs.coders._literals").encode_literals

KIB = 1 << 10
GUARD = b"\xa5" * 64
SHORTEST = 1024  # slices below are left to libzstd


def bound(count: int) -> int:
    """The longest frame: each block as it is."""
    return 9 + count + 3 * -(-count // (128 * KIB))


def encoded(data: bytes, room: int | None = None) -> bytes:
    """The frame, empty where it was not made; nothing is written past the room that there is."""
    room = bound(len(data)) + 8 if room is None else room
    out = bytearray(b"\x5a" * room + GUARD)
    nbytes = encode_literals(memoryview(data), memoryview(out)[:room])
    assert out[room:] == GUARD and nbytes <= bound(len(data))
    return bytes(out[:nbytes])


def by_libzstd(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def blocks(data: bytes) -> list[Block]:
    """The blocks of the frame of `data`, which both decoders have given back."""
    frame = encoded(data)
    assert by_libzstd(frame) == data
    assert zstandard.get_frame_parameters(frame).content_size == len(data)
    found = blocks_of(frame)
    assert b"".join(block.content for block in found) == data
    return found


def drawn(count: int, symbols: np.ndarray, skew: float, seed: int) -> bytes:
    """Some of `symbols`, each `skew` times as often as the next, in random order."""
    shares = skew ** -np.arange(symbols.size, dtype=np.float64)
    random = np.random.default_rng(seed)
    return symbols[random.choice(symbols.size, count, p=shares / shares.sum())].astype(np.uint8).tobytes()


def skewed(count: int, symbols: int, first: int, skew: float, seed: int) -> bytes:
    return drawn(count, np.arange(first, first + symbols), skew, seed)


def counted(counts: list[int], symbols: np.ndarray, seed: int = 0) -> bytes:
    """Exactly so many of each symbol, in random order."""
    data = np.repeat(symbols[: len(counts)], counts).astype(np.uint8)
    return np.random.default_rng(seed).permutation(data).tobytes()


def least_nbits(counts: list[int]) -> int:
    """How many bits the best codes of at most 11 bits take: package-merge from its textbook."""
    leaves = sorted(counts)
    merged = leaves
    for _ in range(10):
        merged = sorted(leaves + [a + b for a, b in zip(merged[::2], merged[1::2], strict=False)])
    return sum(merged[: 2 * len(leaves) - 2])


@settings(max_examples=examples(600), deadline=None)
@given(
    # as many between 1 and 2 KiB as between 64 and 128
    log_count=st.floats(0, 17.2),
    symbols=st.integers(1, 256),
    first=st.integers(0, 255),
    in_order=st.booleans(),
    skew=st.sampled_from([1.0, 1.02, 1.2, 1.618, 2.0, 4.0, 50.0]),
    seed=st.integers(0, 1 << 30),
)
@example(log_count=17, symbols=256, first=0, in_order=True, skew=1.0, seed=0)
@example(log_count=17, symbols=256, first=0, in_order=False, skew=1.02, seed=0)
@example(log_count=17, symbols=40, first=89, in_order=True, skew=2.0, seed=0)
@example(log_count=17, symbols=40, first=216, in_order=True, skew=1.618, seed=0)
@example(log_count=10, symbols=2, first=127, in_order=True, skew=1.0, seed=0)
@example(log_count=10, symbols=2, first=254, in_order=True, skew=1.0, seed=0)
def test_two_decoders_give_it_back(
    log_count: float, symbols: int, first: int, in_order: bool, skew: float, seed: int
) -> None:
    alphabet = np.arange(first, min(first + symbols, 256))
    if not in_order:
        alphabet = np.random.default_rng(seed).permutation(alphabet)
    data = drawn(int(2**log_count), alphabet, skew, seed)
    if len(data) < SHORTEST:
        assert encoded(data) == b""
    else:
        blocks(data)


@settings(max_examples=examples(200), deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 255), st.integers(1, 3000)), min_size=1, max_size=120),
    repeats=st.integers(1, 40),
)
def test_runs(runs: list[tuple[int, int]], repeats: int) -> None:
    data = (b"".join(bytes([symbol]) * length for symbol, length in runs) * repeats)[: 300 * KIB]
    if len(data) >= SHORTEST:
        blocks(data)


@settings(max_examples=examples(300), deadline=None)
@given(counts=st.lists(st.floats(0, 5.4).map(lambda log: int(2.718**log)), min_size=2, max_size=255))
@example(counts=[1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597])  # Huffman's codes are longest
def test_codes_are_the_best_of_at_most_11_bits(counts: list[int]) -> None:
    counts = [*counts, max(SHORTEST, sum(counts))]  # half of one symbol, so that coding pays
    symbols = np.random.default_rng(len(counts)).permutation(256)
    (block,) = blocks(counted(counts, symbols))
    count_of = dict(zip(symbols.tolist(), counts, strict=False))
    assert block.literals == "huffman" and set(block.nbits) == set(count_of)
    assert sum(count_of[symbol] * nbits for symbol, nbits in block.nbits.items()) == least_nbits(counts)
    assert max(block.nbits.values()) <= 11


@settings(max_examples=examples(300), deadline=None)
@given(nbits=st.lists(st.integers(1, 11), min_size=2, max_size=256), gaps=st.integers(0, 1), seed=st.integers(0, 999))
def test_weights_of_all_kinds(nbits: list[int], gaps: int, seed: int) -> None:
    """Counts of powers of two, by which each symbol gets about the length that was drawn."""
    counts = np.array([max(1, (60_000 >> length) // 8) for length in nbits])
    alphabet = np.random.default_rng(seed).permutation(256) if gaps else np.arange(256 - len(nbits), 256)
    data = counted([*counts.tolist()], alphabet, seed) * -(-SHORTEST // counts.sum())
    blocks(data[: 128 * KIB])


# ---- its place in the codec ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"a", b"a" * (SHORTEST - 1)], ids=["empty", "one", "short"])
def test_what_it_leaves_to_libzstd(data: bytes) -> None:
    assert encoded(data) == b""
    frame = bytes(Zstd(literals_only=True, slice_nbytes=256 * KIB).encoder()(memoryview(data)))
    assert by_libzstd(frame) == data


@pytest.mark.parametrize("short", [1, 9, 100, 1000, 128 * KIB])
def test_no_room(short: int) -> None:
    """Not even tried where the longest frame might not fit."""
    data = skewed(128 * KIB, 30, 90, 1.3, 1)
    assert encoded(data, bound(len(data)) + 8 - short) == b""


@pytest.mark.parametrize("slice_nbytes", [1024, 32 * KIB, 128 * KIB, 128 * KIB + 16, 1 << 20])
def test_the_codec_has_room_for_all_frames(slice_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def encode(data: memoryview, out: memoryview) -> int:
        made.append(encode_literals(data, out))
        return made[-1]

    monkeypatch.setattr(coders._literals, "encode_literals", encode)
    noise = np.random.default_rng(1).integers(0, 256, slice_nbytes).astype(np.uint8)
    frame = bytes(Zstd(literals_only=True, slice_nbytes=slice_nbytes).encoder()(noise.data))
    assert made == [bound(slice_nbytes)] == [len(frame)]
    assert by_libzstd(frame) == noise.tobytes()


def test_without_a_compiler_libzstd_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = skewed(128 * KIB, 30, 95, 1.3, 1), skewed(128 * KIB, 30, 95, 1.3, 2)
    encode = Zstd(literals_only=True).encoder()  # it uses its buffer again
    compiled = [bytes(encode(memoryview(data))) for data in (first, second)]
    assert [by_libzstd(frame) for frame in compiled] == [first, second]
    monkeypatch.setattr(coders, "_literals", None)
    frame = bytes(Zstd(literals_only=True).encoder()(memoryview(first)))
    assert frame != compiled[0] and by_libzstd(frame) == first
