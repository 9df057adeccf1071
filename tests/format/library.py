"""Whole data files through the library, in memory: the same dictionary that independent_reader.py makes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_nvcomp.codecs import CodecChain
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.format.data_file import block_row
from dcp_nvcomp.format.footer import FileIdentity, Footer, parse_footer
from dcp_nvcomp.format.framing import TRAILER_NBYTES, check_header, decode_footer, decode_trailer
from dcp_nvcomp.format.record import Record, parse_record
from dcp_nvcomp.loading.bases import base_of
from dcp_nvcomp.saving import data_files
from dcp_nvcomp.saving.data_files import DataFileWriter
from dcp_nvcomp.saving.encode.sources import Member, PendingRecord
from dcp_nvcomp.storage.base import OutputStream

PATH = "run/__0_0_00000000000000000000000000000002.distcp"
IDENTITY = FileIdentity("0" * 31 + "1", "0" * 31 + "2", 0, {"dcp_nvcomp": "0", "torch": "0"})

Contents = dict[tuple[str, tuple[int, ...]], tuple[str, str, tuple[int, ...], tuple[int, ...], bytes]]


class MemoryStream(OutputStream):
    """A data file in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        self.data += data

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.data.clear()


def write_file(records: Iterable[tuple[dict[str, Any], CodecChain | None, bytes]], *, align: bool = False) -> bytes:
    """A data file of records `(description without codec, chain, elements)`; chain None for those in a pack.

    With `align`, each record with blocks begins at a multiple of 4096, as only large ones do otherwise.
    """
    stream, engine = MemoryStream(), CpuEngine()
    writer = DataFileWriter(stream, PATH, IDENTITY, lambda nbytes: None)
    made: list[Record] = []
    before = b""
    with patch.object(data_files, "LARGE_NBYTES", 0 if align else data_files.LARGE_NBYTES):
        for description, chain, elements in records:
            if chain is None:
                made.append(parse_record(description, made, [], 0))
                writer.add_record(made[-1], made[-1].pack or (0, 0))
                continue
            bases: Iterable[np.ndarray | None] = repeat(None)
            if chain.array_to_bytes.has_base:  # the record before
                description = {**description, "base": len(made) - 1}
                bases = blocks_of(made[-1], before)
            record = parse_record({**description, "codec": 0}, made, [chain], 0)
            made.append(record)
            members = () if record.kind == "pack" else (member_of(record),)
            writer.begin(PendingRecord(record, record.element.name, members))
            pairs = zip(blocks_of(record, elements), bases, strict=False)
            writer.append([encode(engine, block, chain, base) for block, base in pairs])
            before = elements
        writer.finish()
    return bytes(stream.data)


def encode(engine: CpuEngine, block: np.ndarray, chain: CodecChain, base: np.ndarray | None) -> EncodedBlock:
    if base is None:
        return engine.encode(block, chain, room(block, chain))
    return engine.encode_from(base[np.newaxis], block[np.newaxis], chain, room(block, chain))


def member_of(record: Record) -> Member:
    return Member(MetadataIndex(record.fqn), record, record.uncompressed_nbytes)


def blocks_of(record: Record, elements: bytes) -> list[np.ndarray]:
    """The blocks of a record, each the bytes of its elements."""
    assert record.grid is not None
    array = np.frombuffer(elements, np.uint8).reshape(*record.shape, record.element.nbytes)
    boxes = map(record.grid.box, range(record.block_count))
    return [np.ascontiguousarray(array[box.index]).reshape(-1) for box in boxes]


def room(block: np.ndarray, chain: CodecChain) -> memoryview:
    return memoryview(bytearray(chain.max_encoded_nbytes(block.nbytes)))


def read_footer(data: bytes) -> Footer:
    """The footer of a data file, its header checked too."""
    tail = data[-TRAILER_NBYTES:]
    trailer = decode_trailer(tail, path=PATH, file_nbytes=len(data))
    description, tables = decode_footer(data[trailer.footer_offset : -TRAILER_NBYTES], tail, trailer, path=PATH)
    footer = parse_footer(description, tables, trailer, path=PATH)
    check_header(data[: int(footer.block_offsets[0])], path=PATH)
    return footer


def read_file(data: bytes, *, verify: str = "full") -> Contents:
    """Everything in a data file."""
    footer, engine = read_footer(data), CpuEngine()
    arrays: list[np.ndarray] = []
    found: Contents = {}
    for record in footer.records:
        if record.pack is not None:
            index, start = record.pack
            nbytes = record.element.nbytes
            out = arrays[index].reshape(-1)[start * nbytes : (start + record.elements) * nbytes]
        else:
            assert record.grid is not None and record.chain is not None
            out = np.empty((*record.shape, record.element.nbytes), np.uint8)
            for index in range(record.block_count):
                number = record.first_block + index
                encoded = memoryview(data)[footer.block_offsets[number] : footer.block_offsets[number + 1]]
                block = np.empty(int(footer.block_nbytes[number]), np.uint8)
                where = record.grid.box(index).index
                needed = base_of(footer, record, number)
                base = None
                if needed is not None and record.base is not None:
                    base = np.ascontiguousarray(arrays[record.base][where]).reshape(-1)
                engine.decode(encoded, block_row(footer, number), record.chain, block, verify=verify, base=base)
                out[where] = block.reshape(out[where].shape)
        arrays.append(out)
        if record.kind != "pack":
            found[record.fqn, record.offsets] = (
                record.kind,
                record.element.name,
                record.shape,
                record.global_shape,
                out.tobytes(),
            )
    return found
