"""`derived`: every bit comes back, whatever masters and weights are, and no file makes it write elsewhere."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import CodecChain, Derived, Zstd
from dcp_nvcomp.codecs.base import ELEMENT_TYPES, U8, EncodedBlock
from dcp_nvcomp.codecs.registry import chain_from_json
from dcp_nvcomp.codecs.transforms import derived
from dcp_nvcomp.codecs.transforms.derived import DERIVED, is_rounded
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.errors import CorruptDataError, FormatError
from tests.effort import examples

BITS = st.one_of(
    st.integers(0, 0xFFFF_FFFF),
    st.sampled_from([0x7F80_0000, 0xFF80_0001, 0x7FC0_0000, 0x8000_0000, 0x7F7F_FFFF, 0xFFFF_FFFF, 1, 0x3F80_8000]),
)


@pytest.fixture(autouse=True, params=["_derived", "derived_numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Every test here runs with the kernels in numpy, and, where they are compiled, with those in C."""
    module: ModuleType = pytest.importorskip(f"dcp_nvcomp.codecs.transforms.{request.param}")
    monkeypatch.setattr(derived, "kernels", module)
    return module


def rounded(master: U8) -> U8:
    """What torch rounds float32 to, as bfloat16."""
    return torch.from_numpy(master.view(np.float32)).bfloat16().view(torch.uint8).numpy()


def trained(count: int, seed: int = 0) -> U8:
    return (np.random.default_rng(seed).normal(0, 0.02, count)).astype(np.float32).view(np.uint8)


def encoded(master: U8, weight: U8) -> EncodedBlock:
    room = memoryview(bytearray(DERIVED.max_encoded_nbytes(master.nbytes)))
    return CpuEngine().encode_from(weight[np.newaxis], master[np.newaxis], DERIVED, room)


def decoded(block: EncodedBlock, weight: U8, *, verify: str = "full") -> U8:
    out = np.full(block.uncompressed_nbytes, 0x55, np.uint8)
    base = weight if DERIVED.array_to_bytes.needs_base(block.row.flags) else None
    CpuEngine().decode(block.data, block.row, DERIVED, out, verify=verify, base=base)
    return out


def test_a_rounded_master_takes_two_bytes_and_its_ties() -> None:
    master = trained(1 << 16)
    block = encoded(master, rounded(master))
    assert len(block.data) <= master.nbytes // 2 + 16 * 6
    np.testing.assert_array_equal(decoded(block, rounded(master)), master)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 1000])
def test_any_length(count: int) -> None:
    master = trained(count)
    block = encoded(master, rounded(master))
    np.testing.assert_array_equal(decoded(block, rounded(master)), master)


def test_ties_of_both_kinds() -> None:
    upper = np.arange(0x3F00, 0x3F00 + 64, dtype=np.uint32)
    bits = np.concatenate([upper << 16 | 0x8000, np.repeat(upper << 16 | 0x1234, 63)])
    master = bits.astype(np.uint32).view(np.uint8)
    block = encoded(master, rounded(master))
    assert block.row.flags == 4 | 32 << 8, "half of the ties are rounded down, to an even half"
    np.testing.assert_array_equal(decoded(block, rounded(master)), master)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(BITS, min_size=1, max_size=200), st.booleans(), st.randoms())
def test_every_bit_pattern(bits: list[int], is_rounded_here: bool, random: object) -> None:
    master = np.array(bits, np.uint32).view(np.uint8)
    weight = rounded(master) if is_rounded_here else np.array(bits[::-1], np.uint32).astype(np.uint16).view(np.uint8)
    block = encoded(master, weight)
    assert len(block.data) <= DERIVED.max_encoded_nbytes(master.nbytes)
    np.testing.assert_array_equal(decoded(block, weight), master)


def test_what_was_not_rounded_is_stored_as_it_is() -> None:
    master = trained(4096)
    block = encoded(master, rounded(trained(4096, seed=1)))
    assert block.row.flags == 0
    np.testing.assert_array_equal(decoded(block, np.zeros(8192, np.uint8)), master)


@pytest.mark.parametrize("wrong", [128, 129])
def test_so_many_exceptions_are_listed(wrong: int) -> None:
    master = trained(4096)
    weight = rounded(master).copy()
    weight.view(np.uint16)[:wrong] ^= 0x100
    block = encoded(master, weight)
    assert block.row.flags == (4 | 128 << 8 if wrong == 128 else 0)
    np.testing.assert_array_equal(decoded(block, weight), master)


def test_cut_weights_are_not_rounded_ones() -> None:
    master = trained(4096)
    assert is_rounded(rounded(master), master)
    assert not is_rounded(np.ascontiguousarray(master.view(np.uint16)[1::2]).view(np.uint8), master)


def with_exceptions(block: EncodedBlock, positions: list[int], values: list[int]) -> EncodedBlock:
    """The block with other exceptions, its CRC right."""
    half_nbytes = block.uncompressed_nbytes // 2
    more = np.array(positions, np.uint32).tobytes() + np.array(values, np.uint16).tobytes()
    data = bytes(block.data[:half_nbytes]) + more + bytes(-len(more) % 16)
    row = block.row._replace(flags=4 | len(positions) << 8)
    return EncodedBlock(memoryview(data), row, block.uncompressed_nbytes)


def test_hostile_exceptions() -> None:
    master = trained(1024)
    weight = rounded(master)
    block = encoded(master, weight)
    assert (decoded(with_exceptions(block, [5, 5], [1, 7]), weight, verify="off").view(np.uint16)[11]) == 7
    for position in (1024, 0xFFFF_FFFF):
        with pytest.raises(CorruptDataError, match="exceptions"):
            decoded(with_exceptions(block, [3, position], [0, 0]), weight, verify="off")
    with pytest.raises(CorruptDataError, match="exceptions"):
        decoded(with_exceptions(block, [0] * 342, [0] * 342), weight, verify="off")  # 2,052 bytes for 2,048
    short = EncodedBlock(block.data, block.row._replace(flags=4 | 0xFF_FFFF << 8), block.uncompressed_nbytes)
    with pytest.raises(CorruptDataError, match="fit"):
        decoded(short, weight, verify="off")


def test_a_flipped_bit_of_the_weight_is_found() -> None:
    master = trained(4096)
    block = encoded(master, rounded(master))
    other = rounded(master).copy()
    other[100] ^= 1
    with pytest.raises(CorruptDataError, match="decoded bytes fail"):
        decoded(block, other)


def test_what_a_footer_may_say_of_it() -> None:
    assert chain_from_json(DERIVED.to_json()) == DERIVED
    assert [flags for flags in range(600) if Derived().check_flags(flags)] == [0, 4, 260, 516]
    assert [name for name, element in ELEMENT_TYPES.items() if Derived().fits(element)] == ["float32"]
    with pytest.raises(FormatError, match="No coder follows"):
        chain_from_json(CodecChain(Derived(), Zstd()).to_json())


def columns_of(floats: U8, rows: int, first: int, stop: int) -> U8:
    """The columns `first` to `stop`, in bytes, of bytes as a matrix."""
    return floats.reshape(rows, -1)[:, first:stop]


# rows, floats in a row, the first of a block's, and how many
BLOCKS = [(1, 1, 0, 1), (7, 33, 3, 17), (64, 1500, 700, 800), (3, 512, 0, 512), (5, 2000, 1, 1025), (2, 4, 1, 0)]


@pytest.mark.parametrize("kind", ["one row", "both cut", "weights contiguous", "masters contiguous"])
@pytest.mark.parametrize("shape", BLOCKS)
def test_blocks_that_are_columns(shape: tuple[int, int, int, int], kind: str) -> None:
    rows, width, first, count = shape
    masters = trained(rows * width)
    weights = rounded(masters).copy()
    weights[:: max(1, weights.size // 5)] ^= 0x20
    master = columns_of(masters, rows, 4 * first, 4 * (first + count))
    weight = columns_of(weights, rows, 2 * first, 2 * (first + count))
    plain = encoded(np.ascontiguousarray(master).reshape(-1), np.ascontiguousarray(weight).reshape(-1))
    if kind in ("one row", "masters contiguous"):
        master = np.ascontiguousarray(master).reshape(1, -1)
    if kind in ("one row", "weights contiguous"):
        weight = np.ascontiguousarray(weight).reshape(1, -1)
    block = CpuEngine().encode_from(weight, master, DERIVED, memoryview(bytearray(plain.uncompressed_nbytes + 64)))
    assert bytes(block.data) == bytes(plain.data) and block.row == plain.row
    into = np.full((rows, width * 4), 0x77, np.uint8)
    part = into[:, 4 * first : 4 * (first + count)]
    base = np.ascontiguousarray(weight).reshape(-1) if block.row.flags else None
    CpuEngine().decode(block.data, block.row, DERIVED, part, verify="full", base=base)
    np.testing.assert_array_equal(part.reshape(master.shape), master)
    part[...] = 0x77
    assert (into == 0x77).all(), "nothing beside it was written"
