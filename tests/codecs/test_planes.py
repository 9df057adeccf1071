"""Planes against a model that follows docs/format.md bit by bit."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import transforms
from dcp_nvcomp.codecs.base import ScratchArrays
from dcp_nvcomp.codecs.transforms import Planes, planes_numpy
from tests.codecs import planes_reference
from tests.effort import examples
from tests.engines.cases import SIGNS, floats

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


def outputs_for(codec: Planes, nbytes: int) -> dict[str, np.ndarray]:
    return {plane.name: np.full(plane.nbytes, 0xAA, np.uint8) for plane in codec.layout(nbytes, 0, True)}


@DRAWN
@given(
    width=st.sampled_from([2, 4, 8]),
    count=st.integers(1, 70) | st.sampled_from([1023, 4096]),
    signs=st.sampled_from(SIGNS),
    pack=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_split_and_merge(width: int, count: int, signs: str, pack: bool, seed: int) -> None:
    raw, codec = floats(width, count, signs, seed), Planes(width, ("exponent",) if pack else ("rest", "exponent"))
    outputs = outputs_for(codec, raw.size)
    flags = codec.split(raw, list(outputs.values()))
    expected_flags, expected = planes_reference.split(torch.from_numpy(raw), codec, pack=pack)
    assert flags == expected_flags and list(expected) == list(codec.plane_names)
    planes = {plane.name: outputs[plane.name][: plane.nbytes] for plane in codec.layout(raw.size, flags, True)}
    assert {name: plane.tobytes() for name, plane in planes.items()} == {
        name: plane.numpy().tobytes() for name, plane in expected.items()
    }
    out = np.full(raw.size, 0x55, np.uint8)
    codec.merge(list(planes.values()), flags, out, ScratchArrays())
    assert out.tobytes() == raw.tobytes() == planes_reference.merge(expected, flags, codec).numpy().tobytes()


@DRAWN
@given(st.binary(min_size=1, max_size=80), st.booleans())
def test_pack_and_unpack(kernels: ModuleType, rest: bytes, is_negative: bool) -> None:
    """Seven bits a float: bit k of those of float 7m + j is bit 7 of byte km + j (docs/format.md)."""
    seven = bytes(byte & 0x7F for byte in rest)
    m = len(seven) // 8
    expected = bytearray(seven[: 7 * m] + seven[8 * m :])
    for j in range(m):
        for k in range(7):
            expected[k * m + j] |= (seven[7 * m + j] >> k & 1) << 7
    packed = np.frombuffer(rest, np.uint8).copy()
    kernels.pack_rest(packed)
    packed = packed[: len(rest) - m]
    assert packed.tobytes() == expected
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


@pytest.mark.parametrize(("coded", "allowed"), [((), {0, 1, 3}), (("exponent",), {0, 1, 3}), (("rest",), {0})])
def test_flags_that_planes_can_have(coded: tuple[str, ...], allowed: set[int]) -> None:
    assert {flags for flags in range(9) if Planes(4, coded).check_flags(flags)} == allowed
