"""The checks of frames before a GPU sees them: no false alarm, and nothing passes that is not a frame's structure."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
import zstandard

from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import BlockRow, Coder, checksum, padded
from dcp_nvcomp.engines.cuda.engine import DecodeJob
from dcp_nvcomp.engines.cuda.frame_checks import frame_faults
from dcp_nvcomp.errors import CorruptDataError
from tests.effort import THOROUGH

from .cases import U8, cpu_encode, engine_on, job, weights
from .kernels_on_cpu import ReferenceKernels
from .literal_coding import GuardPages
from .nvcomp_stand_in import NvcompStandIn, StandInDevice

Frame = tuple[bytes, int]  # and what it decodes to, in bytes

ZSTD, DEFLATE = Zstd(), Deflate()
STRATEGIES = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED)


def faults(coder: Coder, frames: Sequence[Frame], gap: bytes = b"") -> dict[int, str]:
    """Return the faults of frames in one memory, with something between them."""
    nbytes = np.array([len(frame) for frame, _ in frames], np.int64)
    starts = np.cumsum(nbytes + len(gap)) - nbytes
    memory = np.frombuffer(b"".join(gap + frame for frame, _ in frames), np.uint8)
    return frame_faults(coder, memory, starts, nbytes, np.array([length for _, length in frames], np.int64))


def contents(nbytes: int) -> Iterator[bytes]:
    """Contents of several kinds: noise, skewed symbols, runs, text, two symbols, and mixtures with matches."""
    rng = np.random.default_rng(nbytes)
    skewed = np.minimum(rng.geometric(0.2, nbytes), 255).astype(np.uint8)
    yield rng.integers(0, 256, nbytes, np.uint8).tobytes()
    yield skewed.tobytes()
    yield bytes(nbytes)
    yield bytes(nbytes // 2) + skewed[nbytes // 2 :].tobytes()
    yield (b"Whatever an encoder may write, this must let pass. " * (nbytes // 40 + 1))[:nbytes]
    yield rng.integers(7, 9, nbytes, np.uint8).tobytes()
    yield np.concatenate([skewed[: nbytes - nbytes // 2], skewed[: nbytes // 2]]).tobytes()


def zstd_frames(content: bytes, levels: Sequence[int]) -> Iterator[bytes]:
    for level in levels:
        yield zstandard.ZstdCompressor(level).compress(content)
        yield zstandard.ZstdCompressor(level, write_content_size=False, write_checksum=True).compress(content)
    yield bytes(Zstd(-(-len(content) // 16) * 16, literals_only=True).encoder()(memoryview(content)))
    for window_log in (10, 17):
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log, strategy=zstandard.STRATEGY_BTULTRA)
        yield zstandard.ZstdCompressor(compression_params=parameters).compress(content)
    for flush in (zstandard.COMPRESSOBJ_FLUSH_BLOCK, zstandard.COMPRESSOBJ_FLUSH_FINISH):
        compressor = zstandard.ZstdCompressor(3).compressobj()
        step = max(1, len(content) // 20)
        parts = [content[start : start + step] for start in range(0, len(content), step)]
        flushed = [compressor.compress(part) + compressor.flush(flush) for part in parts[:-1] if flush]
        written = b"".join(flushed or [compressor.compress(part) for part in parts[:-1]])
        yield written + compressor.compress(parts[-1]) + compressor.flush()


def deflate_streams(content: bytes, levels: Sequence[int]) -> Iterator[bytes]:
    for level in levels:
        for strategy in STRATEGIES:
            compressor = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
            yield compressor.compress(content) + compressor.flush()
    for flush in (zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH, zlib.Z_PARTIAL_FLUSH, zlib.Z_BLOCK):
        for level in (0, 1):
            compressor = zlib.compressobj(level, zlib.DEFLATED, -15)
            first = compressor.flush(flush) + compressor.compress(content[: len(content) // 2])
            yield (
                first + compressor.flush(flush) + compressor.compress(content[len(content) // 2 :]) + compressor.flush()
            )


SIZES = (1, 2, 5, 6, 7, 63, 255, 256, 257, 1025, 4096, 65535, 65536, 131072, 131073, 400_000)


@pytest.mark.ci
@pytest.mark.parametrize("nbytes", SIZES)
def test_nothing_that_zstd_writes_is_a_fault(nbytes: int) -> None:
    levels = range(-7, 23) if nbytes < 5000 else (-7, 1, 3, 9, 16, 19, 22) if THOROUGH else (1, 5, 13)
    frames = [(frame, nbytes) for content in contents(nbytes) for frame in zstd_frames(content, levels)]
    assert faults(ZSTD, frames) == {}


@pytest.mark.parametrize("nbytes", SIZES)
def test_nothing_that_zlib_writes_is_a_fault(nbytes: int) -> None:
    levels = range(10) if nbytes < 5000 or THOROUGH else (0, 1, 6)
    frames = [(stream, nbytes) for content in contents(nbytes) for stream in deflate_streams(content, levels)]
    assert faults(DEFLATE, frames) == {}


def test_other_coders_and_no_frames_at_all() -> None:
    assert faults(Ans(1 << 20, "|u1", "6.0.0"), [(b"anything", 100)]) == {}
    nothing = np.zeros(0, np.int64)
    for coder in (ZSTD, DEFLATE):
        assert frame_faults(coder, np.zeros(0, np.uint8), nothing, nothing, nothing) == {}


# ---- frames made by hand, each with one fault ------------------------------------------------------------------------


def header(nbytes: int, descriptor: int = 0, more: bytes = b"") -> bytes:
    """Return the header of a single segment, its size in one byte."""
    return bytes.fromhex("28B52FFD") + bytes([0x20 | descriptor]) + more + bytes([nbytes])


SMALL_WINDOW = bytes.fromhex("28B52FFD 00 00")  # of 1 KiB, in a header without the content's size


def block(kind: int, size: int, content: bytes, is_last: int = 1) -> bytes:
    return (size << 3 | kind << 1 | is_last).to_bytes(3, "little") + content


def compressed(literals: bytes, sequences: bytes = b"\0", is_last: int = 1) -> bytes:
    return block(2, len(literals + sequences), literals + sequences, is_last)


def four_streams(count: int, table: bytes, lengths: Sequence[int], streams: bytes) -> bytes:
    coded = table + b"".join(length.to_bytes(2, "little") for length in lengths) + streams
    return (2 | 1 << 2 | count << 4 | len(coded) << 14).to_bytes(3, "little") + coded


RAW = bytes([10 << 3]) + b"0123456789"  # literals as they are, 10 of them
RLE = bytes([100 << 4 & 0xFF | 1 | 1 << 2, 100 >> 4]) + b"x"  # one literal, 100 times
TABLE = bytes([128, 0x10])  # two symbols, of one bit each
EIGHT = b"\xff\x01"  # a stream of 8 such codes, and the end mark
HUFFMAN = four_streams(32, TABLE, (2, 2, 2), 4 * EIGHT)
SEQUENCES = b"\x01\x00\x80"  # one sequence, its tables predefined
MATCHES = compressed(RAW, SEQUENCES)


@pytest.mark.parametrize(
    ("frame", "nbytes"),
    [
        (header(10) + block(0, 10, b"0123456789"), 10),
        (header(10, 1, b"\0") + block(0, 10, b"0123456789"), 10),  # a dictionary that is none
        (header(10, 16) + block(0, 10, b"0123456789"), 10),  # a bit that decoders ignore
        (header(10) + block(0, 0, b"", 0) + block(1, 10, b"x"), 10),
        (header(110) + compressed(RAW, is_last=0) + compressed(RLE), 110),
        (header(32) + compressed(HUFFMAN), 32),
        (header(42) + compressed(HUFFMAN, is_last=0) + compressed(RAW), 42),
        (header(50) + MATCHES, 50),
    ],
)
def test_made_by_hand_and_sound(frame: bytes, nbytes: int) -> None:
    assert faults(ZSTD, [(frame, nbytes)]) == {}


def test_made_by_hand_with_a_repeated_table() -> None:
    treeless = bytes([HUFFMAN[0] | 1, HUFFMAN[1], HUFFMAN[2]])  # the sizes are those with a table
    treeless = (int.from_bytes(treeless, "little") - (len(TABLE) << 14)).to_bytes(3, "little") + HUFFMAN[
        3 + len(TABLE) :
    ]
    repeats = compressed(RAW, b"\x01\xfc\x80")
    assert faults(ZSTD, [(header(64) + compressed(HUFFMAN, is_last=0) + compressed(treeless), 64)]) == {}
    assert faults(ZSTD, [(header(100) + compressed(RAW, SEQUENCES, is_last=0) + repeats, 100)]) == {}
    alone = [(header(32) + compressed(treeless), 32), (header(50) + repeats, 50)]
    found = faults(ZSTD, alone * 2)
    assert sorted(found) == [0, 1, 2, 3]
    assert "literals repeat a table that is not there" in found[0]
    assert "sequences repeat a table that is not there" in found[1]


@pytest.mark.parametrize(
    ("frame", "nbytes", "message"),
    [
        (b"", 10, "no zstd frame"),
        (b"\x29" + header(10)[1:] + block(0, 10, b"0123456789"), 10, "no zstd frame"),
        (header(10), 10, "within its zstd header"),
        (header(10) + b"\1\0", 10, "within its zstd header"),
        (header(10, 8) + block(0, 10, b"0123456789"), 10, "reserved bit of its zstd header"),
        (header(10, 1, b"\1") + block(0, 10, b"0123456789"), 10, "dictionary"),
        (header(10, 3, b"\0\0\0\1") + block(0, 10, b"0123456789"), 10, "dictionary"),
        (header(11) + block(0, 10, b"0123456789"), 10, "another length"),
        (SMALL_WINDOW[:5] + b"\xff" + block(0, 10, b"0123456789"), 10, "window"),
        (header(10) + block(0, 10, b"012345678"), 10, "does not fit into its frame"),
        (header(10) + block(0, 10, b"0123456789", 0), 10, "does not fit into its frame"),
        (header(10) + block(1, 10, b""), 10, "does not fit into its frame"),
        (header(10, 4) + block(0, 10, b"0123456789") + b"CRC", 10, "does not fit into its frame"),
        (header(10) + block(3, 10, b"0123456789"), 10, "reserved type"),
        (header(10) + block(1, 11, b"x"), 10, "longer than its frame allows"),
        (header(10) + block(0, 10, b"0123456789") + b"\0", 10, "after the last zstd block"),
        (header(10) + block(0, 9, b"012345678"), 10, "less than the slice"),
        (header(10) + block(1, 9, b"x", 0) + block(1, 2, b"x"), 10, "more than the slice"),
        (header(15) + compressed(RAW), 15, "less than the slice"),
        (header(99) + compressed(RLE), 99, "more literals"),
        (header(15) + block(2, len(RAW), RAW), 15, "literals do not fit"),
        (header(15) + compressed(RAW, b"\0\0"), 15, "after the last zstd sequence"),
        (header(50) + compressed(RAW, b"\x01\x00"), 50, "sequences do not fit"),
        (header(50) + compressed(RAW, b"\x01\x54\0\0\x80"), 50, "sequences do not fit"),  # tables of one symbol
        (header(50) + compressed(RAW, b"\x01\x01\x80"), 50, "reserved bit of zstd sequences"),
        (header(50) + compressed(RAW, b"\x01\x00\x00"), 50, "no end mark"),
        (header(50) + compressed(RAW, b"\x0e\x00\x80"), 50, "sequences make more"),
        (header(50) + compressed(RAW, b"\x80\x0e\x00\x80"), 50, "sequences make more"),
        (header(50) + compressed(RAW, b"\xff\0\0\x00\x80"), 50, "sequences make more"),
        (header(32) + compressed(four_streams(32, b"\0", (2, 2, 2), 4 * EIGHT)), 32, "is empty"),
        (
            header(32) + compressed(four_streams(32, b"\x7f", (2, 2, 2), 4 * EIGHT)),
            32,
            "table of literals does not fit",
        ),
        (SMALL_WINDOW + compressed(four_streams(5, TABLE, (1, 1, 1), b"\x07\x07\x07\1")), 5, "too few for four"),
        (header(32) + compressed(four_streams(32, TABLE, (2, 2, 4), 4 * EIGHT)), 32, "odd length"),
        (header(32) + compressed(four_streams(32, TABLE, (2, 2, 65535), 4 * EIGHT)), 32, "odd length"),
        (header(32) + compressed(four_streams(32, TABLE, (0, 2, 2), 3 * EIGHT)), 32, "odd length"),
        (header(32) + compressed(four_streams(32, TABLE, (2, 2, 2), 3 * EIGHT + b"\xff\xff\0")), 32, "odd length"),
        (header(32) + compressed(four_streams(32, TABLE, (2, 2, 2), 3 * EIGHT + b"\xff")), 32, "odd length"),
        (
            header(32) + compressed(four_streams(32, TABLE, (2, 2, 2), 3 * EIGHT + 11 * b"\xff" + b"\2")),
            32,
            "odd length",
        ),
    ],
)
def test_made_by_hand_with_one_fault(frame: bytes, nbytes: int, message: str) -> None:
    good = (header(50) + MATCHES, 50)
    found = faults(ZSTD, [good, (frame, nbytes), good], gap=b"\xa5" * 3)
    assert list(found) == [1]
    assert message in found[1]
    assert message in faults(ZSTD, [(frame, nbytes)])[0], "alone too"


def stored(content: bytes, is_last: int) -> bytes:
    length = len(content).to_bytes(2, "little")
    return bytes([is_last]) + length + bytes(byte ^ 255 for byte in length) + content


@pytest.mark.parametrize(
    ("stream", "nbytes", "message"),
    [
        (b"", 10, "does not fit"),
        (b"\3", 10, "does not fit"),
        (b"\7\0", 10, "reserved type"),
        (stored(b"0123456789", 1)[:-1], 10, "does not fit"),
        (stored(b"0123456789", 0), 10, "does not fit"),
        (stored(b"01234", 0) + b"\6", 10, "does not fit"),
        (stored(b"01234", 0) + b"\6\0", 10, "reserved type"),
        (stored(b"01234", 0) + b"\1\5\0\xfa\xfe01234", 10, "lengths"),
        (stored(b"0123456789", 1) + b"\0", 10, "after the last deflate block"),
        (stored(b"012345678", 1), 10, "less than the slice"),
        (stored(b"0123456789", 0) + stored(b"0", 1), 10, "more than the slice"),
        (b"\xf5\0", 10, "too many codes"),
        (b"\5\x1e", 10, "too many codes"),
        (b"\3\0" + bytes(9), 12_000, "too short"),
    ],
)
def test_deflate_made_by_hand_with_one_fault(stream: bytes, nbytes: int, message: str) -> None:
    good = (zlib.compress(b"sound", wbits=-15), 5)
    found = faults(DEFLATE, [good, (stream, nbytes), good])
    assert list(found) == [1]
    assert message in found[1]


@pytest.mark.parametrize("nbytes", [128 << 10, 16 << 20])
def test_made_by_hand_of_empty_blocks(nbytes: int) -> None:
    """A block takes 3 bytes, so a hostile frame may have millions, and each would be a round."""
    empty = bytes.fromhex("28B52FFD A0") + nbytes.to_bytes(4, "little") + bytes(nbytes // 2)
    found = faults(ZSTD, [(empty, nbytes)])
    assert "very many blocks" in found[0]
    found = faults(DEFLATE, [(stored(b"", 0) * (nbytes // 10), nbytes)])
    assert "very many blocks" in found[0]


# ---- corruption ------------------------------------------------------------------------------------------------------


def corrupted(frame: bytes, rng: random.Random) -> bytes:
    """Return a frame with some bits, bytes or lengths changed, most often near its beginning."""
    changed = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(min(len(changed), rng.choice((6, 12, 20, 40, 1 << 20))))
        kind = rng.random()
        if kind < 0.6:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            changed[at] = rng.randrange(256)
        elif kind < 0.9 and len(changed) > 1:
            del changed[at]
        else:
            changed.insert(at, rng.randrange(256))
    return bytes(changed)


@pytest.mark.parametrize("coder", [ZSTD, DEFLATE], ids=["zstd", "deflate"])
def test_nothing_outside_of_the_memory_is_read(coder: Coder) -> None:
    """Whatever the frames say: corrupt ones, and any bytes at all, beside memory that can't be read."""
    make: Callable[[bytes, Sequence[int]], Iterator[bytes]] = zstd_frames if coder is ZSTD else deflate_streams
    good = [(frame, nbytes) for nbytes in (1, 5, 300, 6000) for frame in make([*contents(nbytes)][1], [1, 6])]
    rng, pages, noise = random.Random(0), GuardPages(), np.random.default_rng(0)
    found = 0
    for at in range(3000 if THOROUGH else 300):
        frame, length = rng.choice(good)
        junk = noise.integers(0, 256, rng.choice((1, 7, 9, 40)), np.uint8).tobytes()
        data = corrupted(frame, rng) if at % 3 else junk
        memory = pages.allocate(len(data), at_end=bool(at % 2))
        memory[:] = np.frombuffer(data, np.uint8)
        one = np.array([0]), np.array([len(data)]), np.array([length])
        found += bool(frame_faults(coder, memory, *one))
    assert found > 100


# ---- in blocks whose CRC is right: nvCOMP never sees them, the CPU engine judges -------------------------------------


SLICE = 1 << 20
WHOLE = CodecChain(Bytes(), Zstd(SLICE))
WHOLE_DEFLATE = CodecChain(Bytes(), Deflate(SLICE))


def block_of(frames: Sequence[bytes], content: bytes, chain: CodecChain = WHOLE) -> DecodeJob:
    """Return the job of a block of these frames, each of a slice of SLICE bytes, with good CRCs."""
    data = b"".join(frame.ljust(padded(len(frame)), b"\0") for frame in frames)
    row = BlockRow(0, tuple(map(len, frames)), checksum(memoryview(data)), checksum(memoryview(content)))
    out = torch.full((len(content),), 0xEE, dtype=torch.uint8)
    return DecodeJob(memoryview(data), row, chain, out, path="run/x.distcp", fqn="w", byte_range=(16, 32))


def good_jobs() -> tuple[list[U8], list[DecodeJob]]:
    blocks = [weights(4, 5000, seed=seed) for seed in range(4)]
    chains = [CodecChain(Planes(4), Zstd(2048)), CodecChain(Planes(4), Deflate(2048)), CodecChain(Bytes()), WHOLE]
    return blocks, [job(cpu_encode(block, chain), chain) for block, chain in zip(blocks, chains, strict=True)]


def oversized_raw_block(content: bytes) -> bytes:
    """A frame that libzstd takes and the RFC forbids: more than 128 KiB in one block, then a run."""
    header = bytes.fromhex("28B52FFD A0") + len(content).to_bytes(4, "little")
    stored, run = content[: len(content) // 2], len(content) - len(content) // 2
    assert content[-run:] == content[-1:] * run
    raw = (len(stored) << 3).to_bytes(3, "little") + stored
    return header + raw + (run << 3 | 1 << 1 | 1).to_bytes(3, "little") + content[-1:]


@pytest.mark.parametrize(
    ("frame", "chain"),
    [
        (b"no zstd frame", WHOLE),
        (zstandard.compress(bytes(SLICE))[:-1], WHOLE),
        (zstandard.compress(bytes(SLICE)) + b"\0", WHOLE),
        (zstandard.compress(bytes(SLICE - 1)), WHOLE),
        (b"\7\0", WHOLE_DEFLATE),
        (b"\1\5\0\0\0hello", WHOLE_DEFLATE),
    ],
)
def test_what_is_no_frame_is_refused_before_nvcomp_sees_it(frame: bytes, chain: CodecChain) -> None:
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    with pytest.raises(CorruptDataError, match=r"slice.*x\.distcp.*'w'.*16 to 32"):
        engine.decode([block_of([frame], bytes(SLICE), chain)], verify="stored")
    assert nvcomp.calls == []


def test_an_odd_frame_is_decoded_by_the_cpu_and_all_others_on_the_gpu() -> None:
    content = np.random.default_rng(0).integers(0, 256, SLICE // 2, np.uint8).tobytes() + bytes(SLICE // 2)
    odd = block_of([oversized_raw_block(content)], content)
    nvcomp = NvcompStandIn()
    engine = engine_on(StandInDevice(ReferenceKernels(), nvcomp))
    blocks, good = good_jobs()
    engine.decode([*good[:2], odd, *good[2:]], verify="full")
    assert odd.out.numpy().tobytes() == content
    assert [done.out.numpy().tobytes() for done in good] == [block.tobytes() for block in blocks]
    assert engine.health.wrong_blocks == 0 and engine.health.unusable is None, "the GPU is not to blame"


def test_the_right_block_of_many_is_found() -> None:
    for coder, at, bits in ((Zstd(1024), 4, 8), (Deflate(1024), 0, 6)):
        chain = CodecChain(Bytes(), coder)
        blocks = [np.tile(weights(2, 300, seed=seed), 9) for seed in range(12)]
        encoded = [cpu_encode(block, chain) for block in blocks]
        for bad in range(0, 12, 5):
            engine = engine_on(StandInDevice(ReferenceKernels()))
            jobs = [job(one, chain) for one in encoded]
            data = bytearray(jobs[bad].data)
            data[at] |= bits
            row = jobs[bad].row._replace(encoded_crc=checksum(memoryview(data)))
            jobs[bad] = DecodeJob(memoryview(data), row, chain, jobs[bad].out, byte_range=(bad, bad + 1))
            with pytest.raises(CorruptDataError) as caught:
                engine.decode(jobs, verify="stored")
            assert caught.value.byte_range == (bad, bad + 1)
            assert engine.health.wrong_blocks == 0, "the GPU is not to blame"
