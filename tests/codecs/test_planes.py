"""Planes against a model that follows docs/format.md bit by bit."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import transforms
from dcp_nvcomp.codecs.base import ScratchArrays
from dcp_nvcomp.codecs.transforms import Planes, planes_numpy
from tests.effort import examples

DRAWN = settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True, params=["_planes", "planes_numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Every test here runs with the kernels in numpy, and, where they are compiled, with those in C."""
    module: ModuleType = pytest.importorskip(f"dcp_nvcomp.codecs.transforms.{request.param}")
    monkeypatch.setattr(transforms, "kernels", module)
    return module


def imported_again() -> ModuleType:
    """The module executed once more."""
    spec = importlib.util.find_spec(transforms.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_compiled_kernels_are_used_where_they_are_there() -> None:
    compiled = pytest.importorskip("dcp_nvcomp.codecs.transforms._planes")
    assert imported_again().kernels is compiled


def test_numpy_does_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dcp_nvcomp.codecs.transforms._planes", None)
    monkeypatch.delattr("dcp_nvcomp.codecs.transforms._planes", raising=False)
    assert imported_again().kernels is planes_numpy


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
    codec, scratch = Planes(width, ("exponent",) if pack else ("rest", "exponent")), ScratchArrays()
    outputs = outputs_for(codec, len(raw))
    flags = codec.split(np.frombuffer(raw, np.uint8), list(outputs.values()))
    expected = model_planes(bytes(raw), width)
    constant = len({byte >> 7 for byte in expected["rest"]}) == 1
    assert flags in ((0, 1 | expected["rest"][0] >> 7 << 1) if pack and constant else (0,))
    if pack and constant and count >= 8:
        assert flags  # packing gains a byte or more: it must be done
    if flags:
        expected["rest"] = model_packed(bytes(byte & 0x7F for byte in expected["rest"]))
    planes = {plane.name: outputs[plane.name][: plane.nbytes] for plane in codec.layout(len(raw), flags, True)}
    assert {name: plane.tobytes() for name, plane in planes.items()} == {name: expected[name] for name in planes}
    out = np.full(len(raw), 0x55, np.uint8)
    codec.merge(list(planes.values()), flags, out, scratch)
    assert out.tobytes() == bytes(raw)


@DRAWN
@given(st.binary(max_size=80), st.booleans())
def test_pack_and_unpack(kernels: ModuleType, rest: bytes, is_negative: bool) -> None:
    packed = np.frombuffer(rest, np.uint8).copy()
    kernels.pack_rest(packed)
    packed = packed[: len(rest) - len(rest) // 8]
    seven = bytes(byte & 0x7F for byte in rest)
    assert packed.tobytes() == model_packed(seven)
    out = np.full(len(rest), 0x55, np.uint8)
    kernels.unpack_rest(packed, out, is_negative)
    assert out.tobytes() == bytes(byte | is_negative << 7 for byte in seven)


def test_unpack_ignores_the_free_bit_of_the_last_floats(kernels: ModuleType) -> None:
    out = np.zeros(3, np.uint8)
    kernels.unpack_rest(np.array([0xFF, 0x80, 1], np.uint8), out, False)
    assert out.tolist() == [0x7F, 0, 1]


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 65_536, 65_537, 150_001])
def test_long_blocks_at_odd_addresses(kernels: ModuleType, width: int, count: int) -> None:
    """Longer than a tile or a vector, and where neither numpy nor a compiler may assume alignment."""
    raw = np.frombuffer(np.random.default_rng(count).bytes(count * width + 1), np.uint8)[1:]
    expected = np.frombuffer(raw.tobytes(), np.uint8).reshape(count, width)
    low = np.zeros(count * (width - 2) + 1, np.uint8)[1:] if width > 2 else None
    rest, exponent = np.zeros(count + 1, np.uint8)[1:], np.zeros(count + 1, np.uint8)[1:]
    kernels.split_floats(raw, width, low, rest, exponent)
    assert low is None or low.tobytes() == expected[:, :-2].tobytes()
    assert np.array_equal(exponent, expected[:, -1] << 1 | expected[:, -2] >> 7)
    assert np.array_equal(rest, expected[:, -1] & 0x80 | expected[:, -2] & 0x7F)
    out = np.zeros(raw.size + 1, np.uint8)[1:]
    kernels.merge_floats(out, width, low, rest, exponent)
    assert out.tobytes() == raw.tobytes()


@pytest.mark.parametrize("wrong", ["width", "block", "low", "no low", "rest", "exponent"])
def test_kernels_refuse_sizes_that_do_not_fit(kernels: ModuleType, wrong: str) -> None:
    """Or the compiled ones would write where nothing of theirs is."""
    planes = {"block": np.zeros(64, np.uint8), "width": 4, "low": np.zeros(32, np.uint8)}
    planes |= {"rest": np.zeros(16, np.uint8), "exponent": np.zeros(16, np.uint8)}
    planes |= {"no low": {"low": None}, "width": {"width": 3}}.get(wrong, {wrong: np.zeros(15, np.uint8)})
    arguments = [planes[name] for name in ("block", "width", "low", "rest", "exponent")]
    for kernel in (kernels.split_floats, kernels.merge_floats):
        with pytest.raises(ValueError, match="not those of this block"):
            kernel(*arguments)


def test_unpack_refuses_sizes_that_do_not_fit(kernels: ModuleType) -> None:
    with pytest.raises(ValueError, match="not that of this block"):
        kernels.unpack_rest(np.zeros(13, np.uint8), np.zeros(16, np.uint8), False)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_same_scratch_serves_blocks_of_all_sizes(width: int) -> None:
    codec, scratch, random = Planes(width), ScratchArrays(), np.random.default_rng(1)
    for count in (100, 3, 64, 1, 1000, 8):
        raw = np.frombuffer(random.bytes(count * width), np.uint8)
        outputs = list(outputs_for(codec, raw.size).values())
        flags = codec.split(raw, outputs)
        planes = [
            array[: plane.nbytes] for array, plane in zip(outputs, codec.layout(raw.size, flags, True), strict=True)
        ]
        out = np.empty_like(raw)
        codec.merge(planes, flags, out, scratch)
        assert out.tobytes() == raw.tobytes()


def test_two_byte_floats_have_no_low_plane() -> None:
    assert Planes(2).plane_names == ("rest", "exponent")
    assert Planes(4).plane_names == Planes(8).plane_names == ("low", "rest", "exponent")


@pytest.mark.parametrize(("coded", "allowed"), [((), {0, 1, 3}), (("exponent",), {0, 1, 3}), (("rest",), {0})])
def test_flags_that_planes_can_have(coded: tuple[str, ...], allowed: set[int]) -> None:
    assert {flags for flags in range(9) if Planes(4, coded).check_flags(flags)} == allowed
