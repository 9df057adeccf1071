"""Planes against a model that follows docs/format.md bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs.planes import Planes, SplitScratch, merge, pack_rest, split, unpack_rest

DRAWN = settings(max_examples=100, deadline=None)


def model_planes(block: bytes, width: int) -> dict[str, bytes]:
    """The three planes, unpacked."""
    low, rest, exponent = b"", b"", b""
    for start in range(0, len(block), width):
        bits = int.from_bytes(block[start : start + width], "little")
        sign, top = bits >> (8 * width - 1), bits >> (8 * width - 16)
        low += (bits & (1 << 8 * width - 16) - 1).to_bytes(width - 2, "little")
        rest += bytes([top & 0x7F | sign << 7])
        exponent += bytes([top >> 7 & 0xFF])
    return {"low": low, "rest": rest, "exponent": exponent}


def model_packed(seven: bytes) -> bytes:
    """Seven bits a float: bit k of those of float 7m + j is bit 7 of byte km + j."""
    m = len(seven) // 8
    packed = bytearray(seven[: 7 * m] + seven[8 * m :])
    for j in range(m):
        for k in range(7):
            packed[k * m + j] |= (seven[7 * m + j] >> k & 1) << 7
    return bytes(packed)


def outputs_for(codec: Planes, nbytes: int) -> dict[str, np.ndarray]:
    return {plane.name: np.full(plane.nbytes, 0xAA, np.uint8) for plane in codec.layout(nbytes, 0, True)}


@DRAWN
@given(st.sampled_from([2, 4, 8]), st.integers(1, 70), st.sampled_from([0, 1, 3]), st.booleans(), st.data())
def test_split_and_merge(width: int, count: int, signs: int, pack: bool, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.binary(min_size=count * width, max_size=count * width)))
    if signs:
        for top in range(width - 1, len(raw), width):
            raw[top] = raw[top] & 0x7F | (signs >> 1 << 7)
    codec, scratch = Planes(width), SplitScratch()
    outputs = outputs_for(codec, len(raw))
    flags, rest = split(np.frombuffer(raw, np.uint8), codec, outputs, scratch, pack=pack)
    expected = model_planes(bytes(raw), width)
    constant = len({byte >> 7 for byte in expected["rest"]}) == 1
    assert flags in ((0, 1 | expected["rest"][0] >> 7 << 1) if pack and constant else (0,))
    if pack and constant and count >= 8:
        assert flags  # packing gains a byte or more: it must be done
    if flags:
        expected["rest"] = model_packed(bytes(byte & 0x7F for byte in expected["rest"]))
    planes = {**outputs, "rest": rest}
    assert {name: plane.tobytes() for name, plane in planes.items()} == {name: expected[name] for name in planes}
    assert [(p.name, p.nbytes) for p in codec.layout(len(raw), flags, True)] == [(n, planes[n].nbytes) for n in planes]
    out = np.full(len(raw), 0x55, np.uint8)
    merge(planes, flags, codec, out, scratch)
    assert out.tobytes() == bytes(raw)


@DRAWN
@given(st.lists(st.integers(0, 127), max_size=80).map(bytes))
def test_pack_and_unpack(seven: bytes) -> None:
    scratch = SplitScratch()
    packed = np.full(len(seven) - len(seven) // 8, 0xAA, np.uint8)
    pack_rest(np.frombuffer(seven, np.uint8), packed, scratch)
    assert packed.tobytes() == model_packed(seven)
    out = np.full(len(seven), 0x55, np.uint8)
    unpack_rest(packed, out, scratch)
    assert out.tobytes() == seven


def test_unpack_ignores_the_free_bit_of_the_last_floats() -> None:
    out = np.zeros(3, np.uint8)
    unpack_rest(np.array([0xFF, 0x80, 1], np.uint8), out, SplitScratch())
    assert out.tolist() == [0x7F, 0, 1]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_same_scratch_serves_blocks_of_all_sizes(width: int) -> None:
    codec, scratch, random = Planes(width), SplitScratch(), np.random.default_rng(1)
    for count in (100, 3, 64, 1, 1000, 8):
        raw = np.frombuffer(random.bytes(count * width), np.uint8)
        outputs = outputs_for(codec, raw.size)
        flags, rest = split(raw, codec, outputs, scratch, pack=True)
        out = np.empty_like(raw)
        merge({**outputs, "rest": rest}, flags, codec, out, scratch)
        assert out.tobytes() == raw.tobytes()


def test_two_byte_floats_have_no_low_plane() -> None:
    assert Planes(2).plane_names == ("rest", "exponent")
    assert Planes(4).plane_names == Planes(8).plane_names == ("low", "rest", "exponent")


@pytest.mark.parametrize(("coded", "allowed"), [((), {0, 1, 3}), (("exponent",), {0, 1, 3}), (("rest",), {0})])
def test_flags_that_planes_can_have(coded: tuple[str, ...], allowed: set[int]) -> None:
    assert {flags for flags in range(9) if Planes(4, coded).check_flags(flags)} == allowed
