"""What the library writes, the library and the independent reader read back, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from tests.effort import examples
from tests.format.independent_reader import read_data_file
from tests.format.library import read_file, read_footer, write_file
from tests.format.strategies import chains, element_types, elements, shapes


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_record(data: st.DataObject) -> None:
    element = data.draw(element_types)
    shape, block_shape = data.draw(shapes())
    chain = data.draw(chains(element))
    raw = data.draw(elements(element, int(np.prod(shape, dtype=int))))
    description = {"fqn": "w", "shape": shape, "dtype": element.name, "block_shape": block_shape}
    file = write_file([(description, chain, raw)])
    expected = {("w", (0,) * len(shape)): ("tensor", element.name, tuple(shape), tuple(shape), raw)}
    assert read_file(file) == expected
    assert read_data_file(file) == expected


@pytest.mark.parametrize("dtype", [name for name, kind in ELEMENT_TYPES.items() if kind.float_nbytes == 2])
def test_every_two_byte_float(dtype: str) -> None:
    """All 65,536 of them, NaN payloads and all: as they come, and each sign by itself (packed)."""
    raw = np.arange(1 << 16, dtype="<u2").tobytes()
    count = len(raw) // ELEMENT_TYPES[dtype].nbytes
    description = {"fqn": "w", "shape": [count], "dtype": dtype, "block_shape": [count // 2]}
    for chain in (CodecChain(Planes(2), Zstd()), CodecChain(Planes(2, ("rest", "exponent")), Deflate())):
        file = write_file([(description, chain, raw), ({**description, "block_shape": [count]}, chain, raw)])
        flags = [1, 3, 0] if chain.array_to_bytes == Planes(2) else [0, 0, 0]
        assert read_footer(file).tables.flags.tolist() == flags
        assert read_file(file)["w", (0,)][4] == raw
        assert read_data_file(file)["w", (0,)][4] == raw


@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17, 1000])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_packing_around_multiples_of_eight(width: int, count: int) -> None:
    dtype = {2: "bfloat16", 4: "float32", 8: "float64"}[width]
    random = np.random.default_rng(count)
    for sign in (0, 0x80):
        raw = np.frombuffer(random.bytes(count * width), np.uint8).copy()
        raw[width - 1 :: width] = raw[width - 1 :: width] & 0x7F | sign
        description = {"fqn": "w", "shape": [count], "dtype": dtype, "block_shape": [count]}
        file = write_file([(description, CodecChain(Planes(width), Zstd()), raw.tobytes())])
        assert read_file(file)["w", (0,)][4] == raw.tobytes()
        assert read_data_file(file)["w", (0,)][4] == raw.tobytes()


def all_kinds() -> list[tuple[dict[str, Any], CodecChain | None, bytes]]:
    random = np.random.default_rng(5)
    pack, item, payload = random.bytes(64), random.bytes(33), random.bytes(70)
    inside = {"offsets": [2, 0], "global_shape": [4, 3]}
    return [
        (
            {"fqn": "a", "shape": [3, 5], "dtype": "int16", "block_shape": [2, 5]},
            CodecChain(Bytes(), Zstd(16)),
            pack[:30],
        ),
        (
            {"kind": "pack", "shape": [16], "dtype": "float32", "block_shape": [16]},
            CodecChain(Planes(4), Zstd(16)),
            pack,
        ),
        ({"fqn": "b", "shape": [], "pack": [1, 15]}, None, b""),
        ({"fqn": "c", "shape": [2, 3], "offsets": [2, 3], "global_shape": [4, 6], "pack": [1, 0]}, None, b""),
        (
            {"kind": "bytes", "fqn": "d", "shape": [33], "dtype": "uint8", "block_shape": [10]},
            CodecChain(Bytes()),
            item,
        ),
        (
            {"kind": "torch_save", "fqn": "e", "shape": [70], "dtype": "uint8", "block_shape": [70], **inside},
            CodecChain(Bytes(), Deflate()),
            payload,
        ),
    ]


@pytest.mark.parametrize("align", [False, True])
def test_all_kinds_of_records_together(align: bool) -> None:
    file = write_file(all_kinds(), align=align)
    contents = read_file(file)
    assert contents == read_data_file(file)
    pack = all_kinds()[1][2]
    assert contents["b", ()] == ("tensor", "float32", (), (), pack[60:])
    assert contents["c", (2, 3)] == ("tensor", "float32", (2, 3), (4, 6), pack[:24])
    assert contents["d", (0,)] == ("bytes", "uint8", (33,), (33,), all_kinds()[4][2])
    assert contents["e", (2, 0)] == ("torch_save", "uint8", (70,), (4, 3), all_kinds()[5][2])
    if align:
        footer = read_footer(file)
        firsts = [int(footer.block_offsets[record.first_block]) for record in footer.records if record.block_count]
        assert all(first % 4096 == 0 for first in firsts)


def test_a_file_without_records() -> None:
    file = write_file([])
    assert read_file(file) == read_data_file(file) == {}


def test_slices_not_worth_coding_are_stored() -> None:
    raw = np.random.default_rng(0).bytes(4096)
    description = {"fqn": "w", "shape": [4096], "dtype": "uint8", "block_shape": [4096]}
    for coder in (Zstd(1024), Deflate(1024)):
        file = write_file([(description, CodecChain(Bytes(), coder), raw)])
        footer = read_footer(file)
        assert footer.tables.slice_nbytes.tolist() == [1024] * 4
        assert file[footer.block_offsets[0] :][:4096] == raw
