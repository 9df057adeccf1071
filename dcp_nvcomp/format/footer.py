"""The footer's records, written as JSON, and read and checked against docs/format.md. Pure.

write   Record.to_json() ..., footer_json(identity, ..., records) -> the footer's JSON object
read    parse_footer(the object, tables, trailer) -> Footer

A footer is untrusted input: every number is checked before memory is allocated for it, and the place of each block and
slice follows from sums that must come out at the footer's own offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import ALIGNMENT_NBYTES, CodecChain
from dcp_nvcomp.codecs.dtypes import ELEMENT_TYPES, ElementType
from dcp_nvcomp.codecs.registry import chain_from_json
from dcp_nvcomp.errors import CheckpointError, FormatError, UnsupportedVersionError
from dcp_nvcomp.format.blocks import BlockGrid
from dcp_nvcomp.format.framing import HEADER_NBYTES, Tables, Trailer

__all__ = [
    "KIND_BYTES",
    "KIND_PACK",
    "KIND_TENSOR",
    "KIND_TORCH_SAVE",
    "FileIdentity",
    "Footer",
    "Record",
    "footer_json",
    "parse_footer",
]

KIND_TENSOR = "tensor"
KIND_BYTES = "bytes"
KIND_TORCH_SAVE = "torch_save"
KIND_PACK = "pack"
_KINDS = (KIND_TENSOR, KIND_BYTES, KIND_TORCH_SAVE, KIND_PACK)

# So decoding takes less than 64 MiB beside what it is decoded into: planes, one of them unpacked, and a slice.
MAX_BLOCK_NBYTES = 16 << 20
MAX_BLOCK_SLICES = 1 << 16
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 62
MAX_INTEGER = 1 << 62  # of any other number


@dataclass(frozen=True)
class Record:
    """One record of a footer.

    Attributes:
        kind: `tensor`, `bytes`, `torch_save` or `pack`.
        fqn: the state-dict key; empty for a pack.
        shape: shape of the shard.
        offsets: where it begins in the global tensor.
        global_shape: the global tensor's shape.
        element: the element type.
        pack: index of the pack it lies in and its first element there; None for a record with blocks of its own.
        grid: how it is cut into blocks; None in a pack.
        chain: its codec chain; None in a pack.
        first_block: row of its first block in the block table; 0 until the record is read.
        block_count: how many rows it has there.
    """

    kind: str
    fqn: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    element: ElementType
    pack: tuple[int, int] | None = None
    grid: BlockGrid | None = None
    chain: CodecChain | None = None
    first_block: int = 0
    block_count: int = 0

    @property
    def elements(self) -> int:
        """How many elements the shard has."""
        return math.prod(self.shape)

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes of the shard."""
        return self.elements * self.element.nbytes

    def to_json(self, place: int | tuple[int, int]) -> dict[str, Any]:
        """Return the record as a footer describes it; `_parse_record` is the inverse.

        Args:
            place: index of its codec chain in the footer; or, in a pack, the pack's index and its first element there.
        """
        row: dict[str, Any] = {}
        if self.kind in (KIND_BYTES, KIND_PACK):
            row["kind"] = self.kind
        if self.kind != KIND_PACK:
            row["fqn"] = self.fqn
        row["shape"] = self.shape
        if self.kind == KIND_TORCH_SAVE:
            row |= {"kind": self.kind, "offsets": self.offsets, "global_shape": self.global_shape}
        elif self.kind == KIND_TENSOR:
            if any(self.offsets):
                row["offsets"] = self.offsets
            if self.global_shape != self.shape:
                row["global_shape"] = self.global_shape
        if isinstance(place, tuple):
            row["pack"] = place
            return row
        assert self.grid is not None
        return row | {"dtype": self.element.name, "block_shape": self.grid.block_shape, "codec": place}


@dataclass(frozen=True)
class FileIdentity:
    """Where a data file is from.

    Attributes:
        save_id: id of the writing process's save.
        file_id: id of the file.
        rank: rank that writes it.
        writer: versions of the packages that write it, for people.
    """

    save_id: str
    file_id: str
    rank: int
    writer: dict[str, str]


def footer_json(
    identity: FileIdentity, data_offset: int, tables: Tables, codecs: Sequence[Any], records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a footer's JSON object.

    Args:
        identity: where the file is from.
        data_offset: where its first block begins.
        tables: its tables.
        codecs: its codec chains as JSON.
        records: `Record.to_json` of its records.
    """
    return {
        "save_id": identity.save_id,
        "file_id": identity.file_id,
        "rank": identity.rank,
        "writer": identity.writer,
        "features": [],
        "data_offset": data_offset,
        "blocks": len(tables.flags),
        "slices": len(tables.slice_nbytes),
        "codecs": codecs,
        "records": records,
    }


@dataclass(frozen=True)
class Footer:
    """A checked footer.

    Attributes:
        path: the file, for messages.
        save_id: id of the writing process's save.
        file_id: id of the file.
        rank: rank that wrote it.
        records: the records, in the order in which `.metadata` numbers them.
        tables: the block and slice tables.
        block_offsets: where each block begins in the file, and, last, where the last one ends.
        slice_starts: row of each block's first slice in the slice table, and, last, the number of rows.
        block_nbytes: decoded size of each block.
    """

    path: str
    save_id: str
    file_id: str
    rank: int
    records: tuple[Record, ...]
    tables: Tables = field(repr=False)
    block_offsets: npt.NDArray[np.int64] = field(repr=False)
    slice_starts: npt.NDArray[np.int64] = field(repr=False)
    block_nbytes: npt.NDArray[np.int64] = field(repr=False)

    def record_encoded_nbytes(self, record: Record) -> int:
        """Bytes of the record's blocks in the file. A packed record has none of its own."""
        offsets = self.block_offsets
        return int(offsets[record.first_block + record.block_count] - offsets[record.first_block])


class _Invalid(Exception):
    """A rule of docs/format.md that a footer breaks; becomes a FormatError with the file's path."""


def _dimensions(value: Any, what: str, low: int = 0) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise _Invalid(f"{what} must be a list of at most {MAX_DIMENSIONS} integers")
    for size in value:
        if type(size) is not int or not low <= size <= MAX_ELEMENTS:
            raise _Invalid(f"{what} holds {shown(size)}, which is not an integer from {low} to 2^62")
    return tuple(value)


def _text(description: dict[str, Any], key: str) -> str:
    value = description.get(key)
    if not isinstance(value, str):
        raise _Invalid(f"{key} must be text")
    return value


def _integer(description: dict[str, Any], key: str) -> int:
    value = description.get(key)
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise _Invalid(f"{key} must be an integer from 0 to 2^62")
    return value


def _element_type(name: Any) -> ElementType:
    element = ELEMENT_TYPES.get(name) if isinstance(name, str) else None
    if element is None:
        raise _Invalid(f"the dtype {shown(name)} is unknown")
    return element


def _region(description: dict[str, Any], shape: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and global shape of a record."""
    offsets = _dimensions(description["offsets"], "offsets") if "offsets" in description else None
    whole = _dimensions(description["global_shape"], "global_shape") if "global_shape" in description else None
    if kind in (KIND_BYTES, KIND_PACK):
        return (0,) * len(shape), shape
    if kind == KIND_TORCH_SAVE:
        # shape is that of the payload; where it belongs speaks of the tensor inside
        return offsets or (), whole or ()
    offsets = offsets if offsets is not None else (0,) * len(shape)
    whole = whole if whole is not None else shape
    if not len(offsets) == len(whole) == len(shape):
        raise _Invalid("shape, offsets and global_shape differ in their number of dimensions")
    if any(offset + size > limit for offset, size, limit in zip(offsets, shape, whole, strict=True)):
        raise _Invalid("the shard reaches out of its global tensor")
    return offsets, whole


def _parse_record(
    description: Any, earlier: Sequence[Record], chains: Sequence[CodecChain], first_block: int
) -> Record:
    if not isinstance(description, dict):
        raise _Invalid("it is not an object")
    kind = description.get("kind", KIND_TENSOR)
    if kind not in _KINDS:
        raise _Invalid(f"its kind {shown(kind)} is unknown")
    if description.get("depends_on", []) != []:
        raise UnsupportedVersionError(
            "A record depends on another save, which this reader does not know. Update dcp-nvcomp."
        )
    fqn = "" if kind == KIND_PACK else _text(description, "fqn")
    shape = _dimensions(description.get("shape"), "shape")
    if math.prod(shape) > MAX_ELEMENTS:
        raise _Invalid("it has more than 2^62 elements")
    if kind != KIND_TENSOR and len(shape) != 1:
        raise _Invalid(f"a {kind} record must have one dimension")
    offsets, whole = _region(description, shape, kind)
    if "pack" in description:
        pack, element = _parse_pack(description["pack"], earlier, math.prod(shape), kind)
        return Record(kind, fqn, shape, offsets, whole, element, pack, first_block=first_block)
    element = _element_type(description.get("dtype"))
    if kind in (KIND_BYTES, KIND_TORCH_SAVE) and element.name != "uint8":
        raise _Invalid(f"a {kind} record must be uint8")
    block_shape = _dimensions(description.get("block_shape"), "block_shape", low=1)
    if len(block_shape) != len(shape):
        raise _Invalid("block_shape and shape differ in their number of dimensions")
    grid = BlockGrid(shape, block_shape)
    if math.prod(map(min, block_shape, shape)) * element.nbytes > MAX_BLOCK_NBYTES:
        raise _Invalid(f"its blocks are larger than {MAX_BLOCK_NBYTES} bytes")
    codec = description.get("codec")
    if type(codec) is not int or not 0 <= codec < len(chains):
        raise _Invalid(f"its codec {shown(codec)} is not in the list of codecs")
    if not chains[codec].array_to_bytes.fits(element):
        raise _Invalid(f"its codec can't be that of {element.name} elements")
    return Record(kind, fqn, shape, offsets, whole, element, None, grid, chains[codec], first_block, grid.block_count)


def _parse_pack(value: Any, earlier: Sequence[Record], elements: int, kind: str) -> tuple[tuple[int, int], ElementType]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(number) is int and number >= 0 for number in value)
    ):
        raise _Invalid("pack must be two non-negative integers")
    index, start = value
    if kind == KIND_PACK or index >= len(earlier) or earlier[index].kind != KIND_PACK:
        raise _Invalid("pack must name an earlier pack")
    holder = earlier[index]
    if start + elements > holder.elements:
        raise _Invalid("it reaches out of its pack")
    if kind in (KIND_BYTES, KIND_TORCH_SAVE) and holder.element.name != "uint8":
        raise _Invalid(f"a {kind} record can't lie in a pack of {holder.element.name}")
    return (index, start), holder.element


def _slices_per_block(record: Record, block_nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many slices each block has. Flags don't change it: a packed plane is never a coded one."""
    assert record.chain is not None
    coder = record.chain.coder
    if coder is None:
        return np.zeros(len(block_nbytes), np.int64)
    sizes, inverse = np.unique(block_nbytes, return_inverse=True)
    # counted, not listed: a hostile footer may claim millions of slices
    layouts = [record.chain.array_to_bytes.layout(int(nbytes), 0, True) for nbytes in sizes]
    counts = [sum(-(-plane.nbytes // coder.slice_nbytes) for plane in planes if plane.coded) for planes in layouts]
    if max(counts) > MAX_BLOCK_SLICES:
        raise _Invalid(f"a block has {max(counts)} slices, more than {MAX_BLOCK_SLICES}")
    return np.array(counts, np.int64)[inverse]


def _parse_records(description: dict[str, Any], chains: list[CodecChain], blocks: int) -> tuple[list[Record], int]:
    listed = description.get("records")
    if not isinstance(listed, list):
        raise _Invalid("records must be a list")
    records: list[Record] = []
    total = 0
    for number, one in enumerate(listed):
        try:
            record = _parse_record(one, records, chains, total)
        except _Invalid as problem:
            raise _Invalid(f"record {number}: {problem}") from None
        records.append(record)
        total += record.block_count
        if total > blocks:  # before anything of that size is allocated
            raise _Invalid(f"its records have more blocks than its table, which has {blocks}")
    if total != blocks:
        raise _Invalid(f"its records have {total} blocks, its table {blocks}")
    return records, total


def _locate(
    records: Sequence[Record], tables: Tables, data_offset: int, trailer: Trailer
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where blocks and slices lie; checks that the sums come out."""
    empty = np.zeros(0, np.int64)
    nbytes, counts = [empty], [empty]
    for record in records:
        if record.grid is None or record.block_count == 0:
            continue
        sizes = record.grid.block_elements() * record.element.nbytes
        nbytes.append(sizes)
        counts.append(_slices_per_block(record, sizes))
    block_nbytes = np.concatenate(nbytes)
    offsets = np.concatenate([[data_offset], tables.encoded_nbytes.astype(np.int64)]).cumsum()
    starts = np.concatenate([[0], np.concatenate(counts)]).cumsum()
    if (
        data_offset < HEADER_NBYTES
        or data_offset % ALIGNMENT_NBYTES
        or np.any(tables.encoded_nbytes % ALIGNMENT_NBYTES)
    ):
        raise _Invalid("blocks do not begin at multiples of 16")
    if offsets[-1] != trailer.footer_offset:
        raise _Invalid(f"its blocks end at byte {offsets[-1]}, but the footer begins at {trailer.footer_offset}")
    if starts[-1] != len(tables.slice_nbytes):
        raise _Invalid(f"its blocks have {starts[-1]} slices, its slice table {len(tables.slice_nbytes)}")
    for record in records:
        if record.chain is not None:
            rows = slice(record.first_block, record.first_block + record.block_count)
            if not all(record.chain.array_to_bytes.check_flags(int(flags)) for flags in np.unique(tables.flags[rows])):
                raise _Invalid(f"key {record.fqn!r} has blocks with unknown flags")
    return offsets, starts, block_nbytes


def parse_footer(description: dict[str, Any], tables: Tables, trailer: Trailer, *, path: str) -> Footer:
    """Check what a footer says.

    Args:
        description: its JSON object.
        tables: its tables.
        trailer: the file's trailer.
        path: the file, for messages.

    Returns:
        The footer, which can be relied on.

    Raises:
        UnsupportedVersionError: it needs a feature that is unknown here.
        UnknownCodecError: it names a codec that is unknown here.
        FormatError: it breaks a rule of docs/format.md.
    """
    features = description.get("features")
    if features != []:
        raise UnsupportedVersionError(
            f"The file needs features that this reader does not know: {shown(features)}. Update dcp-nvcomp.",
            path=path,
        )
    try:
        codecs = description.get("codecs")
        if not isinstance(codecs, list):
            raise _Invalid("codecs must be a list")
        chains = [chain_from_json(chain) for chain in codecs]
        data_offset = _integer(description, "data_offset")
        records, _ = _parse_records(description, chains, len(tables.flags))
        offsets, starts, block_nbytes = _locate(records, tables, data_offset, trailer)
        identity = _text(description, "save_id"), _text(description, "file_id"), _integer(description, "rank")
    except _Invalid as problem:
        raise FormatError(f"The footer is not valid: {problem}. The file is damaged.", path=path) from None
    except CheckpointError as error:
        error.path = path
        raise
    return Footer(path, *identity, tuple(records), tables, offsets, starts, block_nbytes)
