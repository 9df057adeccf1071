"""What the library writes, the library and the independent reader read back, byte for byte."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from tests.checkpoints import save
from tests.effort import examples
from tests.format import independent_reader
from tests.format.forgery import SMALL_CONTENTS, small_forgery
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


def test_slices_not_worth_coding_are_stored() -> None:
    raw = np.random.default_rng(0).bytes(4096)
    description = {"fqn": "w", "shape": [4096], "dtype": "uint8", "block_shape": [4096]}
    for coder in (Zstd(1024), Deflate(1024)):
        file = write_file([(description, CodecChain(Bytes(), coder), raw)])
        footer = read_footer(file)
        assert footer.tables.slice_nbytes.tolist() == [1024] * 4
        assert file[footer.block_offsets[0] :][:4096] == raw


def test_where_the_blocks_lie() -> None:
    forgery = small_forgery()
    data = forgery.build()
    assert read_file(data) == independent_reader.read_data_file(data) == SMALL_CONTENTS
    footer = read_footer(data)
    assert footer.block_offsets[0] == 64
    assert np.diff(footer.block_offsets).tolist() == [len(row[0]) for row in forgery.rows]
    assert footer.block_nbytes.tolist() == [len(row[2]) for row in forgery.rows]
    assert np.diff(footer.slice_starts).tolist() == [2, 1, 2, 0, 1]
    assert (footer.save_id, footer.file_id, footer.rank) == ("1" * 32, "2" * 32, 3)
    assert footer.record_encoded_nbytes(footer.records[0]) == len(forgery.rows[0][0]) + len(forgery.rows[1][0])
    assert footer.record_encoded_nbytes(footer.records[3]) == 0


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 63, 64, 65, 100_000])
def test_the_independent_crc(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert independent_reader.crc32c(data) == crc32c(data)


@pytest.mark.parametrize("what", ["encoded_crc", "uncompressed_crc", "footer_crc"])
def test_the_independent_reader_checks_every_crc(what: str) -> None:
    forgery = small_forgery()
    forgery.overrides[what] = 0 if what == "footer_crc" else [0] * len(forgery.rows)
    with pytest.raises(ValueError, match=what):
        independent_reader.read_data_file(forgery.build())


def test_the_independent_reader_is_short_and_independent() -> None:
    text = Path(independent_reader.__file__).read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert len(text.splitlines()) < 170
    assert imported == {"numpy", "zstandard", "zlib", "crc32c", "struct", "json"}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "weight": torch.randn(700, 1000, generator=generator).bfloat16(),
        "moment": torch.randn(900, 700, generator=generator).square(),  # one sign: packed
        "minus": -torch.rand(300, 700, generator=generator, dtype=torch.float64) - 1,
        "transposed": torch.randn(300, 500, generator=generator).T,
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(3, 0, dtype=torch.int16),
        "object": {"lr": 1e-3, "steps": [1, 2, 3]},
    }
    for name in ELEMENT_TYPES:
        dtype = getattr(torch, name, None)  # older releases lack some
        if dtype is not None:
            nbytes = torch.randint(0, 2, (2 * 3 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
            tensors[f"small.{name}"] = nbytes.view(dtype).reshape(2, 3)
    return tensors


@pytest.mark.parametrize("codec", ["auto", "planes-zstd", "planes-deflate", "zstd", "none"])
def test_the_independent_reader_reads_a_checkpoint(codec: str, tmp_path: Path) -> None:
    saved = state()
    several = codec in ("auto", "none")
    save(tmp_path, saved, codec=codec, single_file_per_rank=not several, thread_count=2)
    found: dict[str, Any] = {}
    for path in tmp_path.glob("*.distcp"):
        found |= {fqn: value for (fqn, _), value in read_data_file(path.read_bytes()).items()}
    for fqn, tensor in saved.items():
        if isinstance(tensor, torch.Tensor):
            shape = tuple(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            assert found.pop(fqn) == ("tensor", dtype, shape, shape, raw(tensor)), fqn
    for fqn, value in {"object.lr": 1e-3, "object.steps": [1, 2, 3]}.items():
        kind, dtype, _, _, payload = found.pop(fqn)
        assert (kind, dtype) == ("bytes", "uint8")
        assert torch.load(io.BytesIO(payload), weights_only=True) == value
    assert not found
