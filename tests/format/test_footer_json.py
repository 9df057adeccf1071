"""What saves write into a footer's JSON, the parser reads back."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from dcp_nvcomp.format.block_grid import BlockGrid
from dcp_nvcomp.format.footer import FileIdentity, Footer, footer_json, parse_footer
from dcp_nvcomp.format.framing import TRAILER_NBYTES, Tables, decode_footer, decode_trailer, encode_footer
from dcp_nvcomp.format.record import KIND_BYTES, KIND_PACK, KIND_TENSOR, KIND_TORCH_SAVE, Record
from tests.effort import examples
from tests.format.strategies import chains, element_types, shapes

UINT8 = ELEMENT_TYPES["uint8"]
IDENTITY = FileIdentity("a" * 32, "b" * 32, 3, {"torch": "2", "dcp_nvcomp": "0"})
DRAWN = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])

dimensions = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)


@st.composite
def described(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Kind, shape, offsets, global shape and block shape of a record."""
    kind = draw(st.sampled_from([KIND_TENSOR, KIND_TENSOR, KIND_BYTES, KIND_TORCH_SAVE]))
    if kind == KIND_TENSOR:
        shape, block = map(tuple, draw(shapes()))
        offsets = tuple(draw(st.integers(0, 3)) for _ in shape)
        whole = tuple(size + at + draw(st.integers(0, 2)) for size, at in zip(shape, offsets, strict=True))
        return kind, shape, offsets, whole, block
    size = draw(st.integers(0, 500))
    block = (draw(st.integers(1, 600)),)
    if kind == KIND_BYTES:
        return kind, (size,), (0,), (size,), block
    return kind, (size,), draw(dimensions), draw(dimensions), block


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """The records of a file, packs and their members among them, as a reader numbers their blocks."""
    made: list[Record] = []
    blocks = 0
    for number in range(draw(st.integers(0, 5))):
        kind, shape, offsets, whole, block_shape = draw(described())
        element = draw(element_types) if kind == KIND_TENSOR else UINT8
        chain, fqn = draw(chains(element)), draw(st.text(max_size=5))
        packed = draw(st.booleans())
        if packed:
            start, more = draw(st.integers(0, 3)), draw(st.integers(0, 3))
            size = (start + math.prod(shape) + more,)
            grid = BlockGrid(size, (draw(st.integers(1, 700)),))
            holder = Record(KIND_PACK, "", size, (0,), size, element, None, grid, chain, blocks, grid.block_count)
            made.append(holder)
            blocks += holder.block_count
            place = len(made) - 1, start
            made.append(Record(kind, f"{number}{fqn}", shape, offsets, whole, element, place, first_block=blocks))
        else:
            grid = BlockGrid(shape, block_shape)
            own = (None, grid, chain, blocks, grid.block_count)
            made.append(Record(kind, f"{number}{fqn}", shape, offsets, whole, element, *own))
            blocks += grid.block_count
    return made


def through_bytes(made: list[Record]) -> Footer:
    """The footer of a file of these records, whose blocks have no bytes."""
    codecs: list[object] = []
    rows = []
    for record in made:
        rows.append(record.to_json(record.pack or len(codecs)))
        if record.chain is not None:
            codecs.append(record.chain.to_json())
    blocks = sum(record.block_count for record in made)
    slices = 0
    for record in made:
        if record.grid is not None and record.chain is not None and record.block_count:
            for elements in record.grid.block_elements().tolist():
                slices += sum(piece.coded for piece in record.chain.layout(elements * record.element.nbytes, 0))
    tables = Tables(*(np.zeros(count, np.uint32) for count in (blocks, blocks, blocks, blocks, slices)))
    tail = encode_footer(footer_json(IDENTITY, 16, tables, codecs, rows), tables, 16)
    trailer = decode_trailer(tail[-TRAILER_NBYTES:], path="x", file_nbytes=16 + len(tail))
    description, again = decode_footer(tail[:-TRAILER_NBYTES], tail[-TRAILER_NBYTES:], trailer, path="x")
    return parse_footer(description, again, trailer, path="x")


def what_a_reader_needs(record: Record) -> object:
    """All of it, but a chain as its JSON: levels are not stored."""
    chain = None if record.chain is None else record.chain.to_json()
    return record._replace(chain=None), chain


@DRAWN
@given(records())
def test_the_parser_reads_what_is_written(made: list[Record]) -> None:
    footer = through_bytes(made)
    assert [what_a_reader_needs(record) for record in footer.records] == [what_a_reader_needs(r) for r in made]
    assert (footer.save_id, footer.file_id, footer.rank) == (IDENTITY.save_id, IDENTITY.file_id, IDENTITY.rank)


def test_the_bytes_of_version_1() -> None:
    """The order of the keys too: two saves of a state by different releases differ in their ids only."""
    grid, chain = BlockGrid((4, 3), (2, 3)), CodecChain(Planes(4), Zstd())
    shard = Record(KIND_TENSOR, "w", (4, 3), (4, 0), (8, 3), ELEMENT_TYPES["float32"], None, grid, chain)
    assert list(shard.to_json(0)) == ["fqn", "shape", "offsets", "global_shape", "dtype", "block_shape", "codec"]
    whole = Record(KIND_TENSOR, "w", (4, 3), (0, 0), (4, 3), ELEMENT_TYPES["float32"])
    assert whole.to_json((2, 5)) == {"fqn": "w", "shape": (4, 3), "pack": (2, 5)}
    line = BlockGrid((7,), (7,))
    item = Record(KIND_BYTES, "o", (7,), (0,), (7,), UINT8, None, line, CodecChain(Bytes()))
    assert list(item.to_json(1)) == ["kind", "fqn", "shape", "dtype", "block_shape", "codec"]
    hidden = Record(KIND_TORCH_SAVE, "h", (7,), (), (), UINT8)
    assert list(hidden.to_json((0, 0))) == ["fqn", "shape", "kind", "offsets", "global_shape", "pack"]
    pack = Record(KIND_PACK, "", (7,), (0,), (7,), UINT8, None, line, CodecChain(Bytes()))
    assert list(pack.to_json(1)) == ["kind", "shape", "dtype", "block_shape", "codec"]
