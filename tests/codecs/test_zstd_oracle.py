"""The oracle for zstd frames against the RFC's own example and libzstd, and on frames that it must refuse."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from tests.codecs.zstd_oracle import InvalidFrame, UnsupportedFrame, blocks_of, decode
from tests.effort import examples

MAGIC = bytes.fromhex("28B52FFD")
WINDOW = bytes([0, 0])  # no content size, a window of 1 KiB

# The example of 4.2.1 and 4.2.2 in the RFC: weights 4 3 2 0 1 and an implied 1, and a stream. It calls its symbols
# 0 1 4 5, but by its own table of codes, and libzstd, 0000 is symbol 4 and 0001 symbol 5.
RFC_WEIGHTS = bytes([127 + 5, 0x43, 0x20, 0x10])
RFC_STREAM = bytes([0b00010000, 0b00001101])
RFC_CONTENT = bytes([0, 1, 5, 4])


def block(content: bytes, kind: int = 2, last: bool = True, nbytes: int | None = None) -> bytes:
    nbytes = len(content) if nbytes is None else nbytes
    return (last | kind << 1 | nbytes << 3).to_bytes(3, "little") + content


def literals(coded: bytes, count: int, size_format: int = 0, kind: int = 2) -> bytes:
    """Literals coded by Huffman's method, and no sequences."""
    return (kind | size_format << 2 | count << 4 | len(coded) << 14).to_bytes(3, "little") + coded + b"\0"


def frame(*blocks: bytes, header: bytes = WINDOW) -> bytes:
    return MAGIC + header + b"".join(blocks)


def huffman(weights: bytes = RFC_WEIGHTS, stream: bytes = RFC_STREAM, count: int = 4) -> bytes:
    return frame(block(literals(weights + stream, count)))


def four_streams(*lengths: int, count: int = 7, cut: int = 0) -> bytes:
    """A frame with the symbol 0, one bit long, `count` times; its jump table says `lengths`."""
    quarter = (count + 3) // 4
    streams = [bytes([0xFF >> 7 - n]) for n in (quarter, quarter, quarter, count - 3 * quarter)][: 4 - cut]
    jumps = b"".join(length.to_bytes(2, "little") for length in lengths)
    return frame(block(literals(RFC_WEIGHTS + jumps + b"".join(streams), count, size_format=1)))


def by_libzstd(frame: bytes) -> bytes:
    decompressor = zstandard.ZstdDecompressor()
    return decompressor.decompress(frame, max_output_size=1 << 20, allow_extra_data=False)


def made(count: int, symbols: int, first: int, skew: float, seed: int) -> bytes:
    """Bytes of `symbols` values in random order, each `skew` times as frequent as another."""
    random = np.random.default_rng(seed)
    shares = skew ** -np.arange(symbols, dtype=np.float64)
    values = random.permutation(symbols) + first
    return values[random.choice(symbols, count, p=shares / shares.sum())].astype(np.uint8).tobytes()


def libzstd_frame(data: bytes) -> bytes:
    """The frame that libzstd makes if it may hardly search for matches."""
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17, target_length=0
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def test_the_example_of_the_rfc() -> None:
    assert decode(huffman()) == RFC_CONTENT == by_libzstd(huffman())


def test_all_types_of_blocks_and_literals() -> None:
    whole = frame(
        block(b"raw", kind=0, last=False),
        block(b"r", kind=1, last=False, nbytes=1000),
        block(bytes([3 << 3]) + b"lit" + b"\0", last=False),  # raw literals, the shortest header
        block((1 | 1 << 2 | 500 << 4).to_bytes(2, "little") + b"e" + b"\0", last=False),  # one literal repeated
        block((0 | 3 << 2 | 3 << 4).to_bytes(3, "little") + b"lit" + b"\0", last=False),
        block(literals(RFC_WEIGHTS + RFC_STREAM, 4), last=False),
        block(literals(RFC_STREAM, 4, kind=3)),  # with the table of the block before
    )
    content = b"raw" + b"r" * 1000 + b"lit" + b"e" * 500 + b"lit" + RFC_CONTENT * 2
    assert decode(whole) == content == by_libzstd(whole)
    assert [b.literals for b in blocks_of(whole)] == ["", "", "raw", "rle", "raw", "huffman", "treeless"]


def test_four_streams() -> None:
    assert decode(four_streams(1, 1, 1)) == bytes(7) == by_libzstd(four_streams(1, 1, 1))


@settings(max_examples=examples(200), deadline=None)
@given(
    count=st.integers(0, 5000) | st.integers(100_000, 140_000),
    symbols=st.integers(1, 256),
    first=st.integers(0, 255),
    skew=st.sampled_from([1.0, 1.02, 1.2, 1.618, 2.0, 4.0, 50.0]),
    seed=st.integers(0, 1 << 30),
)
@example(count=140_000, symbols=256, first=0, skew=1.02, seed=0)
@example(count=5000, symbols=40, first=216, skew=1.618, seed=0)
def test_frames_of_libzstd(count: int, symbols: int, first: int, skew: float, seed: int) -> None:
    data = made(count, min(symbols, 256 - first), first, skew, seed)
    try:
        content = decode(libzstd_frame(data))
    except UnsupportedFrame:  # libzstd found matches, by chance
        reject()
    assert content == data


def test_weights_of_libzstd_are_coded_in_both_ways() -> None:
    coded = [blocks_of(libzstd_frame(made(200, symbols, 1, 1.0, 1)))[0].weights for symbols in (6, 40)]
    assert coded == ["listed", "fse"]


@settings(max_examples=examples(300), deadline=None)
@given(
    symbols=st.integers(2, 256),
    skew=st.sampled_from([1.02, 1.2, 1.618]),
    changes=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 7)), min_size=1, max_size=2),
)
def test_it_is_stricter_than_libzstd(symbols: int, skew: float, changes: list[tuple[int, int]]) -> None:
    """Of frames with flipped bits it accepts none that libzstd refuses, and decodes them to the same bytes."""
    changed = bytearray(libzstd_frame(made(1500, symbols, 0, skew, symbols)))
    for at, bit in changes:
        changed[at % len(changed)] ^= 1 << bit
    try:
        content = decode(bytes(changed))
    except (InvalidFrame, UnsupportedFrame):
        return
    assert by_libzstd(bytes(changed)) == content


REFUSED = {
    "nothing": (b"", "0 bytes where 4"),
    "reserved bit": (frame(block(b"a", 0), header=bytes([8, 0])), "reserved bit"),
    "content size": (frame(block(b"a", 0), header=bytes([0x20, 2])), "1 bytes of content where the header says 2"),
    "block type": (frame(block(b"a", 3)), "reserved type"),
    "block above the window": (frame(block(bytes(1025), 0)), "a block of 1025 bytes, more than 1024"),
    "after the frame": (huffman() + b"\0", "1 bytes after the frame"),
    "literals above the window": (
        frame(block((1 | 3 << 2 | 1025 << 4).to_bytes(3, "little") + b"e\0")),
        "1025 literals",
    ),
    "treeless at first": (frame(block(literals(RFC_STREAM, 4, kind=3))), "no Huffman table"),
    "no end mark": (huffman(stream=bytes([0x0D, 0])), "end mark"),
    "bits left": (huffman(count=3), "7 bits used of a stream of 11"),
    "bits missing": (huffman(count=5), "15 bits used of a stream of 11"),
    "no listed weight": (huffman(bytes([128, 0])), "no symbol but the last"),
    "no power of two": (huffman(bytes([129, 0x41])), "no last one completes"),
    "codes of 12 bits": (huffman(bytes([128, 0xC0])), "codes of 12 bits"),
    "no weight of 1": (huffman(bytes([128, 0x20])), "no symbol of weight 1"),
    "fse: log 7": (huffman(bytes([2, 2, 0xFF])), "accuracy log of 7"),
    "fse: no end": (huffman(bytes([1, 0])), "a distribution that does not end"),
    "fse: no bits for states": (huffman(bytes([4, 0x10, 0x7D, 0x01, 1])), "no bits for two states"),
    "fse: one symbol": (huffman(bytes([4, 0xF0, 0x03, 1, 0xFF])), "a distribution of one symbol"),
    "fse: too many weights": (huffman(bytes([102, 0xE0, 0x0F]) + bytes([0xFF] * 100)), "25[67] weights|more than 255"),
    "too few for four streams": (four_streams(1, 1, 1, count=5), "too few for four streams"),
    "jump of two streams": (four_streams(2, 1, 1), "2 bits used of a stream of 10"),
    # what it has no code for
    "a checksum": (frame(block(b"a", 0), header=bytes([4, 0])) + bytes(4), "a content checksum"),
    "a dictionary": (frame(block(b"a", 0), header=bytes([1, 0, 7])), "a dictionary"),
    "sequences": (frame(block(literals(RFC_WEIGHTS + RFC_STREAM, 4)[:-1] + b"\1")), "sequences"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name: str) -> None:
    bad, message = REFUSED[name]
    with pytest.raises((InvalidFrame, UnsupportedFrame), match=message):
        decode(bad)
