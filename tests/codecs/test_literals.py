"""The compiled encoder of literals-only zstd frames: whatever it is given, zstd's own decoder must give it back."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Zstd
from dcp_nvcomp.codecs.coders import zstd
from tests.effort import examples
from tests.faults import forked

# compiled where there is a C compiler
encode_literals = pytest.importorskip("dcp_nvcomp.codecs.coders._literals").encode_literals

KIB = 1 << 10
GUARD = b"\xa5" * 64


def encoded(data: bytes, room: int | None = None) -> bytes:
    """The frame, empty where it was not made; nothing is written behind the room that there is."""
    room = 2 * len(data) + 4096 if room is None else room
    out = bytearray(b"\x5a" * room + GUARD)
    nbytes = encode_literals(memoryview(data), memoryview(out)[:room])
    assert out[room:] == GUARD and nbytes <= room
    return bytes(out[:nbytes])


def decoded(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def nearly_random(data: bytes) -> bool:
    """True if Huffman codes and their table may take as much as the bytes themselves, in the last block at least."""
    shares = np.bincount(np.frombuffer(data, np.uint8)) / len(data)
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
    return bool(entropy / 8 > 0.8)


def skewed(count: int, symbols: int, first: int, skew: float, seed: int) -> bytes:
    """Bytes of `symbols` values, each `skew` times as frequent as the next, in random order."""
    shares = skew ** -np.arange(symbols, dtype=np.float64)
    random = np.random.default_rng(seed)
    return (first + random.choice(symbols, count, p=shares / shares.sum())).astype(np.uint8).tobytes()


def misleading(count: int) -> bytes:
    """Where the sample is taken, few symbols with codes up to the longest; elsewhere 15 others, which get those too."""
    data = np.random.default_rng(1).integers(101, 116, count).astype(np.uint8)
    sampled = np.arange(count) % 248 < 64
    data[sampled] = np.frombuffer(skewed(count, 13, 88, 2.2, 1), np.uint8)[sampled]
    return data.tobytes()


@settings(max_examples=examples(300), deadline=None)
@given(
    count=st.integers(1, 5000) | st.integers(16 * KIB, 17 * KIB) | st.integers(128 * KIB - 5, 130 * KIB),
    symbols=st.integers(1, 129),
    first=st.integers(0, 128),
    skew=st.sampled_from([1.0, 1.02, 1.2, 1.618, 2.0, 4.0, 50.0]),
    seed=st.integers(0, 1 << 30),
)
@example(count=128 * KIB, symbols=129, first=0, skew=1.0, seed=0)
@example(count=128 * KIB, symbols=40, first=89, skew=2.0, seed=0)  # codes longer than 11 bits, before they are cut
@example(count=1024, symbols=2, first=127, skew=1.0, seed=0)
def test_zstd_decodes_it(count: int, symbols: int, first: int, skew: float, seed: int) -> None:
    data = skewed(count, min(symbols, 129 - first), first, skew, seed)
    frame = encoded(data)
    if frame:
        assert decoded(frame) == data
        assert zstandard.get_frame_parameters(frame).content_size == count
    else:
        assert count % (128 * KIB) in range(1, 1024) or nearly_random(data)


@settings(max_examples=examples(100), deadline=None)
@given(
    # each run of a byte hides from a sample of the block, or is all that a sample sees
    runs=st.lists(st.tuples(st.integers(0, 128), st.integers(1, 3000)), min_size=1, max_size=120),
    repeats=st.integers(1, 40),
)
def test_symbols_that_a_sample_does_not_see(runs: list[tuple[int, int]], repeats: int) -> None:
    data = (b"".join(bytes([symbol]) * length for symbol, length in runs) * repeats)[: 300 * KIB]
    frame = encoded(data)
    if frame:
        assert decoded(frame) == data
    else:
        assert len(data) % (128 * KIB) in range(1, 1024) or len(runs) > 12


@pytest.mark.parametrize("at", [0, 63, 64, 247, 248, 70_000, 131_071])
@pytest.mark.parametrize("odd", [0, 89, 125, 128])
def test_one_odd_byte(at: int, odd: int) -> None:
    """Zeros among exponents, or a single large value: in no sample, perhaps far out of the range of the others."""
    data = bytearray(skewed(128 * KIB, 30, 95, 1.3, at))
    data[at] = odd
    frame = encoded(bytes(data))
    assert frame and decoded(frame) == data


@pytest.mark.parametrize("count", [1024, 1025, 1026, 1027, 100_000, 131_072, 131_072 + 1024, 3 * 131_072])
def test_all_lengths_of_the_last_stream(count: int) -> None:
    data = skewed(count, 20, 100, 1.5, count)
    frame = encoded(data)
    assert frame and decoded(frame) == data


def test_runs_of_one_byte() -> None:
    for symbol in (0, 128, 255):
        data = bytes([symbol]) * (200 * KIB)
        assert len(encoded(data)) < 32 and decoded(encoded(data)) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a" * 1023,
        skewed(128 * KIB, 2, 128, 1.0, 1),  # 129 can't be listed
        misleading(128 * KIB),  # would become longer
        skewed(128 * KIB + 1023, 20, 100, 1.5, 1),  # a second block too short for it
    ],
    ids=["empty", "short", "high", "misleading", "short block"],
)
def test_what_it_leaves_to_libzstd(data: bytes) -> None:
    assert encoded(data) == b""
    frame = bytes(Zstd(literals_only=True, slice_nbytes=256 * KIB).encoder()(memoryview(data)))
    assert decoded(frame) == data


@pytest.mark.parametrize("room", [0, 1, 8, 9, 100, 5000, 60_000, 180_000])
def test_no_room(room: int) -> None:
    frame = encoded(skewed(128 * KIB, 30, 90, 1.3, 1), room)
    assert frame == b""  # not even tried where the longest might not fit


@pytest.mark.parametrize("skew", [1.05, 1.3, 1.618, 3.0])
def test_it_codes_as_well_as_libzstd(skew: float) -> None:
    data = skewed(128 * KIB, 30, 95, skew, 1)
    level = len(zstandard.ZstdCompressor(level=3).compress(data))
    assert len(encoded(data)) < 1.01 * level


def test_an_encoder_may_use_its_buffer_again() -> None:
    encode = Zstd(literals_only=True).encoder()
    first, second = skewed(128 * KIB, 30, 95, 1.3, 1), skewed(128 * KIB, 30, 95, 1.3, 2)
    assert decoded(bytes(encode(memoryview(first)))) == first
    assert decoded(bytes(encode(memoryview(second)))) == second


def test_without_a_compiler_libzstd_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = skewed(128 * KIB, 30, 95, 1.3, 1)
    compiled = bytes(Zstd(literals_only=True).encoder()(memoryview(data)))
    monkeypatch.setattr(zstd, "_literals", None)
    frame = bytes(Zstd(literals_only=True).encoder()(memoryview(data)))
    assert frame != compiled and decoded(frame) == data


def test_bytes_that_change_meanwhile() -> None:
    """Another process may write into a tensor: the frame is of no use then, but memory stays whole."""
    code = """
import random, threading
from dcp_nvcomp.codecs.coders._literals import encode_literals
narrow = bytes(random.Random(1).choices(range(90, 100), k=1 << 17))
wide = bytes(random.Random(2).randbytes(1 << 17))
data, out, stop = bytearray(narrow), bytearray(1 << 18), threading.Event()
def write():
    while not stop.is_set():
        data[64:] = wide[64:]
        data[64:] = narrow[64:]
writer = threading.Thread(target=write)
writer.start()
made = [encode_literals(memoryview(data), memoryview(out)) for _ in range(4000)]
stop.set()
writer.join()
assert 0 in made and any(made)  # it was seen changing
"""
    done = forked.execute("import faulthandler; faulthandler.enable()\n" + code)
    assert done.returncode == 0, done.stderr
