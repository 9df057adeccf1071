"""The compiled encoder of literals-only zstd frames: whatever it is given, two decoders must give it back."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dcp_nvcomp.codecs import Planes, Zstd, coders
from tests.codecs.literal_slices import CHANGING
from tests.codecs.zstd_oracle import Block, blocks_of
from tests.effort import examples
from tests.faults import forked

# compiled where there is a C compiler
encode_literals = pytest.importorskip("dcp_nvcomp.codecs.coders._literals").encode_literals

KIB = 1 << 10
GUARD = b"\xa5" * 64
SHORTEST = 1024  # slices below are left to libzstd
REAL_STATE = Path(__file__).parents[1] / "data" / "gpt_block.safetensors"


def bound(count: int) -> int:
    """The longest frame: each block as it is."""
    return 9 + count + 3 * -(-count // (128 * KIB))


def encoded(data: bytes, room: int | None = None) -> bytes:
    """The frame, empty where it was not made; nothing is written behind the room that there is."""
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


def fibonacci(count: int) -> list[int]:
    """Counts for which Huffman's codes are as long as they can be: one bit longer for each symbol."""
    counts = [1, 1]
    while len(counts) < count:
        counts.append(counts[-1] + counts[-2])
    return counts


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


@pytest.mark.parametrize("at", [0, 63, 64, 247, 248, 70_000, 131_071])
@pytest.mark.parametrize("odd", [0, 89, 125, 128, 129, 255])
def test_one_odd_byte(at: int, odd: int) -> None:
    """Zeros among exponents, or a single large value, perhaps far out of the range of the others."""
    data = bytearray(skewed(128 * KIB, 30, 95, 1.3, at))
    data[at] = odd
    (block,) = blocks(bytes(data))
    assert block.literals == "huffman" and odd in block.nbits


@pytest.mark.parametrize("symbols", [20, 200])  # pairs of symbols, and single ones
@pytest.mark.parametrize("count", [*range(1024, 1033), 100_000, 131_065, 131_066, 131_071, 131_072, 131_073, 300_001])
def test_all_lengths_of_the_last_stream(count: int, symbols: int) -> None:
    blocks(skewed(count, symbols, 40, 1.05, count))


@pytest.mark.parametrize("short", [1, 2, 5, 6, 9, 63, 64, 100, 1023])
def test_a_short_last_block(short: int) -> None:
    kinds = [block.kind for block in blocks(skewed(128 * KIB + short, 4, 100, 3.0, 1))]
    assert kinds == ["compressed", "rle" if short == 1 else "raw" if short < 64 else "compressed"]


def test_runs_of_one_byte() -> None:
    for symbol in (0, 128, 255):
        data = bytes([symbol]) * (200 * KIB)
        assert [block.kind for block in blocks(data)] == ["rle", "rle"]
        assert len(encoded(data)) < 32


# ---- codes -----------------------------------------------------------------------------------------------------------


def assert_best(counts: list[int], symbols: np.ndarray) -> Block:
    (block,) = blocks(counted(counts, symbols))
    assert block.literals == "huffman"
    count_of = dict(zip(symbols.tolist(), counts, strict=False))
    assert set(block.nbits) == set(count_of)
    assert sum(count_of[symbol] * nbits for symbol, nbits in block.nbits.items()) == least_nbits(counts)
    assert max(block.nbits.values()) <= 11
    return block


@pytest.mark.parametrize("symbols", range(16, 24))
@pytest.mark.parametrize("first", [0, 90, 105, 232])
def test_the_longest_codes(symbols: int, first: int) -> None:
    block = assert_best(fibonacci(symbols), np.arange(first, first + symbols))
    assert max(block.nbits.values()) == 11


@settings(max_examples=examples(300), deadline=None)
@given(counts=st.lists(st.floats(0, 5.4).map(lambda log: int(2.718**log)), min_size=2, max_size=255))
def test_codes_are_the_best_of_at_most_11_bits(counts: list[int]) -> None:
    counts = [*counts, max(SHORTEST, sum(counts))]  # half of one symbol, so that coding pays
    assert_best(counts, np.random.default_rng(len(counts)).permutation(256))


# ---- descriptions of codes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "weights"),
    [
        (skewed(64 * KIB, 30, 95, 1.3, 1), "fse"),
        (skewed(64 * KIB, 30, 226, 1.3, 1), "fse"),
        (skewed(64 * KIB, 200, 20, 1.02, 1), "fse"),
        (skewed(64 * KIB, 2, 0, 1.0, 1), "listed"),  # a single weight
        (skewed(64 * KIB, 128, 0, 1.0, 1), "listed"),  # 127 that are all the same
        (skewed(64 * KIB, 2, 127, 1.0, 1), "fse"),
        (skewed(64 * KIB, 2, 128, 1.0, 1), "fse"),
        (skewed(64 * KIB, 2, 254, 1.0, 1), "fse"),
        (counted([1000, 999, 998], np.array([0, 1, 2])), "listed"),
    ],
)
def test_weights_are_listed_or_compressed(data: bytes, weights: str) -> None:
    assert [block.weights for block in blocks(data)] == [weights]


@settings(max_examples=examples(300), deadline=None)
@given(nbits=st.lists(st.integers(1, 11), min_size=2, max_size=256), gaps=st.integers(0, 1), seed=st.integers(0, 999))
def test_weights_of_all_kinds(nbits: list[int], gaps: int, seed: int) -> None:
    """Counts of powers of two, by which each symbol gets about the length that was drawn."""
    counts = np.array([max(1, (60_000 >> length) // 8) for length in nbits])
    alphabet = np.random.default_rng(seed).permutation(256) if gaps else np.arange(256 - len(nbits), 256)
    data = counted([*counts.tolist()], alphabet, seed) * -(-SHORTEST // counts.sum())
    blocks(data[: 128 * KIB])


def test_what_does_not_shrink_is_kept_as_it_is() -> None:
    noise = np.random.default_rng(1).integers(0, 256, 300 * KIB).astype(np.uint8).tobytes()
    assert [block.kind for block in blocks(noise)] == ["raw"] * 3
    assert len(encoded(noise)) == bound(len(noise))
    both = noise[: 128 * KIB] + skewed(128 * KIB, 30, 95, 1.3, 1)
    assert [block.kind for block in blocks(both)] == ["raw", "compressed"]


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


@pytest.mark.parametrize("symbols", [30, 150])
@pytest.mark.parametrize("skew", [1.05, 1.3, 1.618, 3.0])
def test_it_codes_better_than_libzstd(skew: float, symbols: int) -> None:
    data = skewed(128 * KIB, symbols, 95, skew, 1)
    assert len(encoded(data)) <= len(zstandard.ZstdCompressor(level=3).compress(data))


def test_exponents_of_a_real_state() -> None:
    """They take less than libzstd's literals: 0.8 % of it is the matches that it finds by chance."""
    ours = theirs = 0
    for tensor in load_file(REAL_STATE).values():
        floats = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        codec = Planes(tensor.element_size())
        planes = {plane.name: np.empty(plane.nbytes, np.uint8) for plane in codec.layout(floats.size, 0, True)}
        codec.split(floats, list(planes.values()))
        for start in range(0, planes["exponent"].size, 32 * KIB):
            data = planes["exponent"][start : start + 32 * KIB].tobytes()
            if len(data) >= SHORTEST:
                blocks(data)
                ours += len(encoded(data))
                theirs += len(zstandard.ZstdCompressor(level=1).compress(data))
    assert 0 < ours < 0.99 * theirs


def test_an_encoder_may_use_its_buffer_again() -> None:
    encode = Zstd(literals_only=True).encoder()
    first, second = skewed(128 * KIB, 30, 95, 1.3, 1), skewed(128 * KIB, 30, 95, 1.3, 2)
    assert by_libzstd(bytes(encode(memoryview(first)))) == first
    assert by_libzstd(bytes(encode(memoryview(second)))) == second


def test_without_a_compiler_libzstd_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = skewed(128 * KIB, 30, 95, 1.3, 1)
    compiled = bytes(Zstd(literals_only=True).encoder()(memoryview(data)))
    monkeypatch.setattr(coders, "_literals", None)
    frame = bytes(Zstd(literals_only=True).encoder()(memoryview(data)))
    assert frame != compiled and by_libzstd(frame) == data


def test_bytes_that_change_meanwhile(tmp_path: Path) -> None:
    """Another process may write into a tensor: the frame is of no use then, but it is one, and memory stays whole."""
    narrow, wide = (np.random.default_rng(1).integers(low, high, 1 << 17) for low, high in ((90, 100), (0, 200)))
    (tmp_path / "slices").write_bytes(pickle.dumps([one.astype(np.uint8).tobytes() for one in (narrow, wide)]))
    imports = "import faulthandler, pickle, sys; from dcp_nvcomp.codecs.coders import _literals as kernels\n"
    done = forked.execute(f"{imports}faulthandler.enable()\n{CHANGING}", "", str(tmp_path / "slices"))
    assert done.returncode == 0, done.stderr
