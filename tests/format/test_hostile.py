"""Footers and frames made to do harm: only CheckpointErrors escape, quickly and in little memory."""

from __future__ import annotations

import contextlib
import copy
import math
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import zstandard
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import BlockRow
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.errors import CheckpointError, CodecUnavailableError, CorruptDataError, FormatError
from tests.cpu_time import within_cpu_seconds
from tests.effort import examples
from tests.format.forgery import Forgery, deflate_stream, small_forgery, zstd_frame
from tests.format.library import read_file, read_footer

DRAWN = settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---- footers ----

numbers = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([1 << power for power in (16, 20, 24, 31, 32, 40, 60, 62, 63, 64, 1000)]),
    st.sampled_from([15, 17, (1 << 62) + 1, (1 << 31) - 1, 1e300, 0.5, True]),
)
scalars = st.one_of(
    st.none(), numbers, st.text(max_size=5), st.sampled_from(["pack", "bytes", "planes", "zstd", "ans"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "configuration", "x"]), inner),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@DRAWN
@given(st.data())
def test_mutated_json(data: st.DataObject) -> None:
    forgery = small_forgery()
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(forgery.description)))
        action = data.draw(st.sampled_from(["number", "value", "value", "remove", "repeat", "swap"]))
        if action == "remove":
            del container[key]
        elif action == "repeat" and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif action == "swap":
            other, other_key = data.draw(st.sampled_from(places(forgery.description)))
            container[key] = copy.deepcopy(other[other_key])
        else:
            container[key] = data.draw(numbers if action == "number" else values)
    check_that_it_is_harmless(forgery)


@DRAWN
@given(st.data())
def test_mutated_tables(data: st.DataObject) -> None:
    forgery = small_forgery()
    rows, slices = len(forgery.rows), len(forgery.slices)
    columns = {
        "encoded_nbytes": [len(row[0]) for row in forgery.rows],
        "flags": [row[1] for row in forgery.rows],
        "slices": list(forgery.slices),
    }
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(sorted(columns)))
        index = data.draw(st.integers(0, (slices if name == "slices" else rows) - 1))
        change = data.draw(st.sampled_from([-16, -1, 1, 2, 3, 16, 32]) | st.integers(0, 0xFFFFFFFF))
        columns[name][index] = (columns[name][index] + change) % (1 << 32)
    forgery.overrides.update(columns)
    # CRCs that match, so that what they protect is tried too
    at, crcs, encoded = 0, [], b"".join(row[0] for row in forgery.rows)
    for nbytes in columns["encoded_nbytes"]:
        crcs.append(crc32c(encoded[at : at + nbytes]))
        at += nbytes
    forgery.overrides["encoded_crc"] = crcs
    check_that_it_is_harmless(forgery)


def check_that_it_is_harmless(forgery: Forgery) -> None:
    data = forgery.build()
    tracemalloc.start()
    try:
        with within_cpu_seconds(2), contextlib.suppress(CheckpointError):
            read_file(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # this test's own reader allocates what the records say; they are at most as many blocks as there are rows
    assert peak < (8 + 64 * len(forgery.rows)) << 20


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 3))
def test_random_json_text(text: bytes, blocks: int, slices: int) -> None:
    forgery = small_forgery()
    forgery.overrides["json"] = text or b" "
    with pytest.raises(CheckpointError):
        read_file(forgery.build())


def one_record(shape: list[int], block_shape: list[int], slice_nbytes: int = 16) -> dict[str, Any]:
    return {
        "save_id": "1" * 32,
        "file_id": "2" * 32,
        "rank": 0,
        "features": [],
        "data_offset": 16,
        "codecs": [[{"name": "bytes", "configuration": {}}, {"name": "zstd", "configuration": {"slice_nbytes": 16}}]],
        "records": [{"fqn": "w", "shape": shape, "dtype": "uint8", "block_shape": block_shape, "codec": 0}],
    }


def refuse_in_little_memory(forgery: Forgery, match: str | None = None) -> None:
    data = forgery.build()
    tracemalloc.start()
    try:
        with within_cpu_seconds(1), pytest.raises(FormatError, match=match):
            read_footer(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_millions_of_slices_that_are_not_there() -> None:
    description = one_record([0], [1])
    # each block of another size, so that nothing remembered helps
    description["records"] = [
        {"fqn": str(i), "shape": [(16 << 20) - i], "dtype": "uint8", "block_shape": [16 << 20], "codec": 0}
        for i in range(64)
    ]
    forgery = Forgery({**description, "blocks": 64, "slices": 0}, [(bytes(16), 0, b"")] * 64, [])
    refuse_in_little_memory(forgery, match="slices, more than 65536")


@pytest.mark.parametrize(
    ("shape", "block_shape"),
    [
        ([1 << 60], [1]),
        ([1 << 60], [1 << 25]),
        ([1 << 31, 1 << 31], [1, 1 << 20]),
        ([1] * 62 + [1 << 30, 1 << 32], [1] * 64),
        ([2] * 62, [1] * 62),
    ],
)
def test_blocks_that_are_not_there(shape: list[int], block_shape: list[int]) -> None:
    assert math.prod(shape) <= 1 << 62
    description = {**one_record(shape, block_shape), "blocks": 1, "slices": 0}
    refuse_in_little_memory(Forgery(description, [(bytes(16), 0, b"")], []))


def test_huge_empty_shapes_cost_nothing() -> None:
    forgery = Forgery({**one_record([1 << 62, 0, 1 << 62], [1, 1, 1]), "blocks": 0, "slices": 0}, [], [])
    (record,) = read_footer(forgery.build()).records
    assert (record.elements, record.block_count) == (0, 0)


# ---- frames ----


def decode(frame: bytes, coder: Any, nbytes: int) -> bytes:
    """One slice through the engine, with CRCs that match."""
    data = frame + bytes(-len(frame) % 16)
    row = BlockRow(0, (len(frame),), crc32c(data), 0)
    out = np.empty(nbytes, np.uint8)
    CpuEngine().decode(memoryview(data), row, CodecChain(Bytes(), coder), out, verify="stored")
    return out.tobytes()


def zstd_header(*, content: int | None, window_log: int) -> bytes:
    """Magic and frame header; with a content size, the frame is one segment."""
    if content is None:
        return struct.pack("<IBB", 0xFD2FB528, 0, (window_log - 10) << 3)
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, content)


def zstd_rle(nbytes: int, *, last: bool) -> bytes:
    """A block of one byte, repeated: four bytes that decode to up to 128 KiB."""
    return (nbytes << 3 | 1 << 1 | last).to_bytes(3, "little") + b"\0"


HONEST = bytes(range(16)) * 256
BAD_ZSTD = {
    "claims 2^40 bytes": zstd_header(content=1 << 40, window_log=0) + zstd_rle(128 << 10, last=True),
    "claims one byte more": zstd_frame(HONEST + b"\0"),
    "claims one byte less": zstd_frame(HONEST[:-1]),
    "claims the right size, decodes to less": zstd_header(content=4096, window_log=0) + zstd_rle(100, last=True),
    "claims the right size, decodes to more": zstd_header(content=4096, window_log=0) + zstd_rle(8192, last=True),
    "claims nothing, decodes to less": zstd_header(content=None, window_log=12) + zstd_rle(100, last=True),
    "claims nothing, decodes to 100 MB": (
        zstd_header(content=None, window_log=17) + zstd_rle(128 << 10, last=False) * 800 + zstd_rle(1, last=True)
    ),
    "window of 2 GiB": zstd_header(content=None, window_log=31) + zstd_rle(4096, last=True),
    "window of 2 TiB": zstd_header(content=None, window_log=41) + zstd_rle(4096, last=True),
    "no last block": zstd_header(content=4096, window_log=0) + zstd_rle(4096, last=False),
    "a byte after it": zstd_frame(HONEST) + b"\0",
    "an empty frame after it": zstd_frame(HONEST) + zstd_frame(b""),
    "a skippable frame after it": zstd_frame(HONEST) + struct.pack("<II", 0x184D2A50, 0),
    "a skippable frame alone": struct.pack("<II", 0x184D2A50, 8) + bytes(8),
    "two frames": zstd_frame(HONEST[:2048]) + zstd_frame(HONEST[2048:]),
    "a dictionary": struct.pack("<IBBH", 0xFD2FB528, 0x61, 7, 4096 - 256) + zstd_rle(4096, last=True),
    "a reserved bit": struct.pack("<IBH", 0xFD2FB528, 0x68, 4096 - 256) + zstd_rle(4096, last=True),
    "a legacy magic": struct.pack("<I", 0xFD2FB527) + zstd_frame(HONEST)[4:],
    "no frame": b"these are not the bytes you are looking for",
    "nothing": b"",
    "zero bytes": bytes(100),
    "a wrong checksum": zstandard.ZstdCompressor(write_checksum=True).compress(HONEST)[:-1] + b"\x55",
}
BAD_DEFLATE = {
    "decodes to one byte more": deflate_stream(HONEST + b"\0"),
    "decodes to one byte less": deflate_stream(HONEST[:-1]),
    "decodes to 1 GiB": zlib.compressobj(9, zlib.DEFLATED, -15).compress(b"") + deflate_stream(bytes(1 << 20)),
    "no last block": (lambda c: c.compress(HONEST) + c.flush(zlib.Z_FULL_FLUSH))(
        zlib.compressobj(6, zlib.DEFLATED, -15)
    ),
    "a zlib header": zlib.compress(HONEST),
    "a stored block whose lengths disagree": b"\x01\x00\x10\x00\x00" + HONEST,
    "a block of the reserved type": b"\x07" + bytes(50),
    "a distance before the start": bytes([0x4B, 0x04, 0x82, 0x00, 0x00]),
    "no stream": b"these are not the bytes you are looking for",
    "nothing": b"",
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("what", list(BAD_ZSTD))
def test_bad_zstd_slices(what: str) -> None:
    with pytest.raises(CorruptDataError):
        decode(BAD_ZSTD[what], Zstd(4096), len(HONEST))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("what", list(BAD_DEFLATE))
def test_bad_deflate_slices(what: str) -> None:
    with pytest.raises(CorruptDataError):
        decode(BAD_DEFLATE[what], Deflate(4096), len(HONEST))


@pytest.mark.parametrize("coder", [Zstd(4096), Deflate(4096)], ids=lambda coder: coder.name)
def test_frames_cut_anywhere(coder: Any) -> None:
    frame = bytes(coder.encoder()(memoryview(HONEST)))
    assert decode(frame, coder, len(HONEST)) == HONEST
    for length in range(len(frame)):
        with pytest.raises(CorruptDataError):
            decode(frame[:length], coder, len(HONEST))


@pytest.mark.parametrize("coder", [Zstd(4096), Deflate(4096)], ids=lambda coder: coder.name)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_frames_with_random_damage(coder: Any, data: st.DataObject) -> None:
    frame = bytearray(coder.encoder()(memoryview(HONEST)))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptDataError):
        assert len(decode(bytes(frame), coder, len(HONEST))) == len(HONEST)


@pytest.mark.parametrize("level", [1, 3, 9, 19, None])
def test_frames_of_streaming_encoders_decode(level: int | None) -> None:
    """They do not say how much they hold, and ask for a window of up to 8 MiB: RFC 8878 wants that of every decoder."""
    if level is None:
        frame = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(HONEST)
    else:
        compressor = zstandard.ZstdCompressor(level=level).compressobj()
        frame = compressor.compress(HONEST) + compressor.flush()
    assert zstandard.get_frame_parameters(frame).content_size == zstandard.CONTENTSIZE_UNKNOWN
    assert decode(frame, Zstd(4096), len(HONEST)) == HONEST


def test_a_short_block_does_not_read_its_neighbour() -> None:
    """A view that is too short for its planes is refused, whatever follows it in the same buffer."""
    chain = CodecChain(Planes(2, ()), None)
    whole = memoryview(bytes(range(256)))
    out = np.empty(128, np.uint8)
    for nbytes in (0, 16, 64, 112):
        row = BlockRow(0, (), crc32c(whole[:nbytes]), 0)
        with pytest.raises(CorruptDataError):
            CpuEngine().decode(whole[:nbytes], row, chain, out, verify="stored")


@pytest.mark.parametrize("slices", [(), (16,), (16, 16, 16), (32, 32), (0, 0)])
def test_slices_that_are_not_those_of_the_codec(slices: tuple[int, ...]) -> None:
    data = bytes(64)
    row = BlockRow(0, slices, crc32c(data), 0)
    with pytest.raises(CorruptDataError):
        CpuEngine().decode(
            memoryview(data), row, CodecChain(Bytes(), Zstd(16)), np.empty(32, np.uint8), verify="stored"
        )


def test_verify_says_which_check_failed() -> None:
    data = bytes(32)
    chain, out = CodecChain(Bytes()), np.empty(32, np.uint8)
    good, bad = crc32c(data), crc32c(data) ^ 1
    engine = CpuEngine()
    engine.decode(memoryview(data), BlockRow(0, (), good, good), chain, out, verify="full")
    engine.decode(memoryview(data), BlockRow(0, (), good, bad), chain, out, verify="stored")
    engine.decode(memoryview(data), BlockRow(0, (), bad, bad), chain, out, verify="off")
    with pytest.raises(CorruptDataError, match="stored bytes fail"):
        engine.decode(memoryview(data), BlockRow(0, (), bad, good), chain, out, verify="stored")
    with pytest.raises(CorruptDataError, match="decoded bytes fail"):
        engine.decode(memoryview(data), BlockRow(0, (), good, bad), chain, out, verify="full")


def test_ans_says_what_is_missing() -> None:
    engine, chain, block = CpuEngine(), CodecChain(Bytes(), Ans(1 << 20)), np.zeros(64, np.uint8)
    with pytest.raises(CodecUnavailableError, match="NVIDIA GPU"):
        engine.encode(block, chain, memoryview(bytearray(64)))
    with pytest.raises(CodecUnavailableError, match="save it again with codec='auto'"):
        decode(b"x" * 20, Ans(1 << 20), 64)


def test_ans_slices_that_were_stored_need_no_gpu() -> None:
    assert decode(HONEST, Ans(1 << 20), len(HONEST)) == HONEST
