"""The compiled decoder of literals-only zstd frames: what it decodes, libzstd decodes alike, also what is corrupt.

What it is not sure of it leaves to libzstd, so that is the oracle: there are no wrong answers but other bytes than
libzstd's, memory that is not its own, and leaving frames of `_literals.c` to libzstd. Sources are compiled here under
sanitizers, so that mutations of them are seen (tests/faults/mutations/literals.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard

from dcp_nvcomp.codecs import Zstd, coders
from dcp_nvcomp.errors import CorruptDataError
from tests.effort import THOROUGH

from .literal_slices import damaged, edges, skewed, slices
from .sanitizers import run_sanitized
from .zstd_oracle import decode as by_the_rfc

# compiled where there is a C compiler
literals = pytest.importorskip("dcp_nvcomp.codecs.coders._literals")

KIB = 1 << 10

DECODE = """
import ctypes
decoded = []
for frame, nbytes in pickle.load(open(sys.argv[2], "rb")):
    # of exactly these lengths, on a heap that is watched
    source, out = (ctypes.c_char * len(frame)).from_buffer_copy(frame), (ctypes.c_char * nbytes)()
    decoded.append(out.raw if kernels.decode_literals(source, out) else None)
pickle.dump(decoded, open(sys.argv[3], "wb"))
"""


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(1)


def framed(data: bytes) -> bytes:
    """A frame of the compiled encoder."""
    out = bytearray(len(data) + len(data) // KIB + 64)
    nbytes = literals.encode_literals(memoryview(data), memoryview(out))
    assert nbytes
    return bytes(out[:nbytes])


def decoded(frame: bytes, nbytes: int) -> bytes | None:
    """What the frame decodes to; None where it is left to libzstd."""
    out = bytearray(nbytes)
    return bytes(out) if literals.decode_literals(memoryview(frame), memoryview(out)) else None


def libzstd(frame: bytes, nbytes: int) -> bytes | None:
    try:
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError:
        return None
    return content if len(content) == nbytes else None


def sanitized(sanitized_literals: Path, folder: Path, pairs: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
    """`decoded`, for many frames, under sanitizers."""
    (folder / "frames").write_bytes(pickle.dumps(pairs))
    run_sanitized(DECODE, sanitized_literals, folder / "frames", folder / "decoded")
    found: list[bytes | None] = pickle.loads((folder / "decoded").read_bytes())
    assert len(found) == len(pairs)
    return found


# ---- intact frames ---------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_all_that_the_encoder_makes(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    made = edges(random) + slices(random, 1500 if THOROUGH else 150)
    assert sanitized(sanitized_literals, tmp_path, [(framed(data), len(data)) for data in made]) == made


def test_streams_of_unequal_speed(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    """One of the four is done long before the others, which then go on alone."""
    made = []
    for quick in range(4):
        quarters = [skewed(random, 32 * KIB, 40, 90, 1.05) for _ in range(4)]
        quarters[quick] = skewed(random, 32 * KIB, 3, 90, 30.0)
        made.append(np.concatenate(quarters).tobytes())
    assert sanitized(sanitized_literals, tmp_path, [(framed(data), len(data)) for data in made]) == made


def test_frames_of_libzstd(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    """Those that have no sequences are decoded here too, with other descriptions of codes than our encoder's."""
    encode = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17, target_length=0
        )
    ).compress
    made = [
        skewed(random, 128 * KIB - int(random.integers(50_000)), symbols, int(random.integers(257 - symbols)), skew)
        for symbols in (20, 60, 90, 130, 200, 256)
        for skew in (1.005, 1.01, 1.02, 1.04, 1.1)
        for _ in range(20 if THOROUGH else 2)
    ]
    frames = [encode(data.tobytes()) for data in made]
    found = sanitized(
        sanitized_literals, tmp_path, [(frame, data.size) for frame, data in zip(frames, made, strict=True)]
    )
    assert sum(one is not None for one in found) > 10
    assert all(one in (None, data.tobytes()) for one, data in zip(found, made, strict=True))


def block(kind: int, size: int, content: bytes, *, last: bool) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + content


def frame_of(nbytes: int, *blocks: bytes) -> bytes:
    return b"\x28\xb5\x2f\xfd\xa0" + nbytes.to_bytes(4, "little") + b"".join(blocks)


def test_blocks_of_all_kinds(random: np.random.Generator) -> None:
    full, data = 128 * KIB, skewed(random, 128 * KIB, 30, 90, 1.3).tobytes()
    content = framed(data)[12:]
    noise, rest = random.bytes(full), random.bytes(777)
    frame = frame_of(
        4 * full + 777,
        block(0, full, noise, last=False),
        block(2, len(content), content, last=False),
        block(1, full, b"\x07", last=False),
        block(2, len(content), content, last=False),
        block(0, 777, rest, last=True),
    )
    whole = noise + data + b"\x07" * full + data + rest
    assert libzstd(frame, len(whole)) == whole == decoded(frame, len(whole))


# ---- what is left to libzstd -----------------------------------------------------------------------------------------


def test_what_is_none_of_ours(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    data = skewed(random, 50_000, 20, 90, 1.3).tobytes()
    repeated = data[:300] * 400
    frames = [
        zstandard.ZstdCompressor(level=3).compress(repeated[:50_000]),
        zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data),
        zstandard.ZstdCompressor(level=3, write_content_size=False).compress(data),
        b"",
        b"\x28",
        b"\x28\xb5\x2f\xfd\xa0\x01",
        frame_of(50_000),
        frame_of(50_000, b"\x01\x00"),
        frame_of(50_000, block(3, 5, b"abcde", last=True)),
        frame_of(50_000, block(2, 5, bytes([2 | 3 << 2, 0, 0, 0, 0]), last=True)),
        frame_of(50_000, block(2, 4, bytes([2 | 1 << 2, 0, 0, 0]), last=True)),
        frame_of(50_000, block(0, 50_000, data, last=False)),
        frame_of(50_000, block(0, 50_001, data + b"a", last=True)),
        frame_of(50_000, block(1, 50_001, b"a", last=True)),
        frame_of(50_000, block(0, 0, b"", last=False), block(0, 50_000, data, last=True)),
    ]
    pairs = [(frame, 50_000) for frame in frames]
    pairs.append((frame_of(200 * KIB, block(0, 200 * KIB, random.bytes(200 * KIB), last=True)), 200 * KIB))
    assert sanitized(sanitized_literals, tmp_path, pairs) == [None] * len(pairs)


def test_a_wrong_length(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    """Of the frame, or of what it decodes to, also where its header says that."""
    pairs = []
    for symbols in (1, 20, 256):
        frame = framed(skewed(random, 5000, symbols, 0, 1.0).tobytes())
        for nbytes in (1, 100, 4999, 5001, 6000):
            pairs += [(frame, nbytes), (frame[:5] + nbytes.to_bytes(4, "little") + frame[9:], nbytes)]
        pairs += [(other, 5000) for other in (frame[:-1], frame + b"\0", frame + frame)]
    assert sanitized(sanitized_literals, tmp_path, pairs) == [None] * len(pairs)


def test_every_frame_that_is_cut(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    data = skewed(random, 1500, 30, 90, 1.2).tobytes()
    frame = framed(data)
    pairs = [(frame[:end], len(data)) for end in range(len(frame))]
    assert sanitized(sanitized_literals, tmp_path, pairs) == [None] * len(frame)


# ---- corrupt frames --------------------------------------------------------------------------------------------------


def resized(frame: bytes) -> bytes:
    """A frame of one block, whose sizes are made to fit again what became of it."""
    block_nbytes = len(frame) - 12
    header = int.from_bytes(frame[12:17], "little") & (1 << 22) - 1 | max(0, block_nbytes - 6) << 22
    last = (block_nbytes << 3 | 2 << 1 | 1).to_bytes(3, "little")
    return frame[:9] + last + (header & (1 << 40) - 1).to_bytes(5, "little") + frame[17:-1] + b"\0"


def test_corrupt_frames(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    made = [skewed(random, n, s, 100, w) for n in (1024, 1100, 3001, 9000) for s in (2, 5, 12, 40, 140, 256)
            for w in (1.0, 1.2, 2.0)]  # fmt: skip
    intact = [(framed(data.tobytes()), data.size) for data in made]
    pairs = []
    for _ in range(60_000 if THOROUGH else 4000):
        frame, nbytes = intact[int(random.integers(len(intact)))]
        frame = damaged(random, frame)
        is_one_block = len(frame) > 20 and frame[9] & 7 == 5
        pairs.append((resized(frame) if is_one_block and random.integers(2) else frame, nbytes))
    found = sanitized(sanitized_literals, tmp_path, pairs)
    left, changed = found.count(None), 0
    contents = dict(zip((frame for frame, _ in intact), made, strict=True))
    for content, (frame, nbytes) in zip(found, pairs, strict=True):
        if content is not None:
            assert libzstd(frame, nbytes) == content, (frame, nbytes)
            changed += frame not in contents
    assert left > len(pairs) // 4 and changed > len(pairs) // 50


def test_corrupt_descriptions(sanitized_literals: Path, tmp_path: Path, random: np.random.Generator) -> None:
    """Only codes are changed, so that many are still a description, of other codes: over 16 KiB, and then libzstd."""
    pairs = []
    for _ in range(20_000 if THOROUGH else 1500):
        data = skewed(random, 1024, int(random.integers(2, 256)), 0, float(random.choice([1.05, 1.3, 2.0])))
        frame = bytearray(framed(data.tobytes()))
        if frame[9] >> 1 & 3 != 2:
            continue
        length = frame[17] if frame[17] < 128 else (frame[17] - 126) // 2
        for _ in range(int(random.integers(1, 3))):
            frame[17 + int(random.integers(1 + length))] ^= 1 << int(random.integers(8))
        pairs.append((bytes(frame), data.size))
    found = sanitized(sanitized_literals, tmp_path, pairs)
    for content, (frame, nbytes) in zip(found, pairs, strict=True):
        if content is not None:
            assert libzstd(frame, nbytes) == content == by_the_rfc(frame), (frame, nbytes)
    assert len(pairs) > 500


# ---- its place in the codec ------------------------------------------------------------------------------------------


class _Refusing:
    """In libzstd's place."""

    def __init__(self, **options: int) -> None:
        pass

    def decompress(self, *args: object, **options: object) -> bytes:
        raise AssertionError("libzstd was asked")


def test_the_codec_decodes_its_own_frames_itself(monkeypatch: pytest.MonkeyPatch, random: np.random.Generator) -> None:
    data = skewed(random, 128 * KIB, 30, 90, 1.3).tobytes()
    monkeypatch.setattr(zstandard, "ZstdDecompressor", _Refusing)
    out = bytearray(len(data))
    Zstd().decoder()(memoryview(framed(data)), memoryview(out))
    assert out == data
    matched = zstandard.ZstdCompressor().compress(data[:100] * 1000)
    with pytest.raises(AssertionError, match="libzstd was asked"):
        Zstd().decoder()(memoryview(matched), memoryview(bytearray(100_000)))


@pytest.mark.parametrize("compiled", [True, False])
def test_with_and_without_it(monkeypatch: pytest.MonkeyPatch, random: np.random.Generator, compiled: bool) -> None:
    data = skewed(random, 50_000, 30, 90, 1.3).tobytes()
    frames = [framed(data), zstandard.ZstdCompressor().compress(data)]
    if not compiled:
        monkeypatch.setattr(coders, "_literals", None)
    for frame in frames:
        out = bytearray(len(data))
        Zstd().decoder()(memoryview(frame), memoryview(out))
        assert out == data
        with pytest.raises(CorruptDataError, match="claims to decode to 50000 bytes"):
            Zstd().decoder()(memoryview(frame), memoryview(bytearray(49_999)))
        with pytest.raises(CorruptDataError, match="does not decode"):
            Zstd().decoder()(memoryview(frame[:-9]), memoryview(out))
