"""A data file's footer: written as JSON, and read and checked against docs/format.md. Pure.

A footer is untrusted input: every number is checked before memory is allocated for it, and the place of each block and
slice follows from sums that must come out at the footer's own offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import ALIGNMENT_NBYTES, CodecChain
from dcp_nvcomp.codecs.registry import CODECS, FEATURES, chain_from_json
from dcp_nvcomp.errors import CheckpointError, FormatError, UnsupportedVersionError
from dcp_nvcomp.format.framing import HEADER_NBYTES, Tables, Trailer
from dcp_nvcomp.format.record import Invalid, Record, integer, parse_record, text

MAX_BLOCK_SLICES = 1 << 16


@dataclass(frozen=True)
class FileIdentity:
    """Origin of a data file."""

    save_id: str  # id of the writing process's save
    file_id: str  # id of the file
    rank: int  # rank that writes it
    writer: dict[str, str]  # versions of the packages that write it, for people


def footer_json(
    identity: FileIdentity, data_offset: int, tables: Tables, codecs: Sequence[Any], records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a footer's JSON object."""
    return {
        **vars(identity),
        "features": _features(codecs),
        "data_offset": data_offset,
        "blocks": len(tables.flags),
        "slices": len(tables.slice_nbytes),
        "codecs": codecs,
        "records": records,
    }


def _features(codecs: Sequence[Any]) -> list[str]:
    """Return the additions to the format that these codecs are: none, in most files, which all versions read."""
    named = {CODECS[codec["name"]].feature for chain in codecs for codec in chain if codec["name"] in CODECS}
    return sorted(feature for feature in named if feature is not None)


@dataclass(frozen=True)
class Footer:
    """A checked footer."""

    path: str  # the file, for messages
    save_id: str  # id of the writing process's save
    file_id: str  # id of the file
    rank: int  # rank that wrote it
    records: tuple[Record, ...]  # the records, in the order in which `.metadata` numbers them
    tables: Tables = field(repr=False)  # the block and slice tables
    block_offsets: npt.NDArray[np.int64] = field(repr=False)
    slice_starts: npt.NDArray[np.int64] = field(repr=False)
    block_nbytes: npt.NDArray[np.int64] = field(repr=False)  # decoded size of each block

    def record_encoded_nbytes(self, record: Record) -> int:
        """Return the size of the record's blocks in the file. A packed record has none of its own."""
        offsets = self.block_offsets
        return int(offsets[record.first_block + record.block_count] - offsets[record.first_block])


def _slice_count(chain: CodecChain, nbytes: int) -> int:
    """Return the number of slices of a block. Flags don't change it: they leave coded planes as they are."""
    if chain.coder is None:
        return 0
    # counted, not listed: a hostile footer may claim millions of slices
    planes = chain.array_to_bytes.layout(nbytes, 0, True)
    count = sum(-(-plane.nbytes // chain.coder.slice_nbytes) for plane in planes if plane.coded)
    if count > MAX_BLOCK_SLICES:
        raise Invalid(f"a block has {count} slices, more than {MAX_BLOCK_SLICES}")
    return count


def _slices_per_block(chain: CodecChain, block_nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if block_nbytes.size == 1:  # thousands of tensors have one block
        return np.array([_slice_count(chain, int(block_nbytes[0]))], np.int64)
    sizes, inverse = np.unique(block_nbytes, return_inverse=True)
    return np.array([_slice_count(chain, int(nbytes)) for nbytes in sizes], np.int64)[inverse]


def parse_records(description: dict[str, Any], chains: list[CodecChain], blocks: int) -> list[Record]:
    """Return the records of a footer whose table has `blocks` blocks, all of which they must use."""
    listed = description.get("records")
    if not isinstance(listed, list):
        raise Invalid("records must be a list")
    records: list[Record] = []
    total = 0
    for number, one in enumerate(listed):
        try:
            record = parse_record(one, records, chains, total)
        except Invalid as problem:
            raise Invalid(f"record {number}: {problem}") from None
        records.append(record)
        total += record.block_count
        if total > blocks:  # before anything of that size is allocated
            raise Invalid(f"its records have more blocks than its table, which has {blocks}")
    if total != blocks:
        raise Invalid(f"its records have {total} blocks, its table {blocks}")
    return records


def _locate(
    records: Sequence[Record], tables: Tables, data_offset: int, trailer: Trailer
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the places of blocks and slices; check that the sums come out."""
    empty = np.zeros(0, np.int64)
    nbytes, counts = [empty], [empty]
    known: dict[Any, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}  # most tensors are like others
    for record in records:
        if record.grid is None or record.block_count == 0:
            continue
        assert record.chain is not None
        kind = record.grid.shape, record.grid.block_shape, record.element.nbytes, id(record.chain)
        found = known.get(kind)
        if found is None:
            sizes = record.grid.block_elements() * record.element.nbytes
            found = known[kind] = sizes, _slices_per_block(record.chain, sizes)
        nbytes.append(found[0])
        counts.append(found[1])
    block_nbytes = np.concatenate(nbytes)
    offsets = np.concatenate([[data_offset], tables.encoded_nbytes.astype(np.int64)]).cumsum()
    starts = np.concatenate([[0], np.concatenate(counts)]).cumsum()
    if (
        data_offset < HEADER_NBYTES
        or data_offset % ALIGNMENT_NBYTES
        or np.any(tables.encoded_nbytes % ALIGNMENT_NBYTES)
    ):
        raise Invalid("blocks do not begin at multiples of 16")
    if offsets[-1] != trailer.footer_offset:
        raise Invalid(f"its blocks end at byte {offsets[-1]}, but the footer begins at {trailer.footer_offset}")
    if starts[-1] != len(tables.slice_nbytes):
        raise Invalid(f"its blocks have {starts[-1]} slices, its slice table {len(tables.slice_nbytes)}")
    flags = tables.flags.tolist()
    for record in records:
        if record.chain is not None:
            of_record = set(flags[record.first_block : record.first_block + record.block_count])
            if not all(map(record.chain.array_to_bytes.check_flags, of_record)):
                raise Invalid(f"key {record.fqn!r} has blocks with unknown flags")
    return offsets, starts, block_nbytes


def parse_footer(description: dict[str, Any], tables: Tables, trailer: Trailer, *, path: str) -> Footer:
    """Check and return a footer."""
    features = description.get("features")
    if not isinstance(features, list) or not all(isinstance(one, str) and one in FEATURES for one in features):
        raise UnsupportedVersionError(
            f"The file needs features that this reader does not know: {shown(features)}. Update dcp-nvcomp.", path=path
        )
    try:
        codecs = description.get("codecs")
        if not isinstance(codecs, list):
            raise Invalid("codecs must be a list")
        chains = [chain_from_json(chain) for chain in codecs]
        data_offset = integer(description, "data_offset")
        records = parse_records(description, chains, len(tables.flags))
        offsets, starts, block_nbytes = _locate(records, tables, data_offset, trailer)
        identity = text(description, "save_id"), text(description, "file_id"), integer(description, "rank")
    except Invalid as problem:
        raise FormatError(f"The footer is not valid: {problem}. The file is corrupt.", path=path) from None
    except CheckpointError as error:
        error.path = path
        raise
    return Footer(path, *identity, tuple(records), tables, offsets, starts, block_nbytes)
