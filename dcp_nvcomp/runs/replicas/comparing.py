"""What replicas have saved, compared by the checksums in their files; no tensor is read, and nothing moves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.format.data_file import find_data_file, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.names import data_file_rank
from dcp_nvcomp.format.record import KIND_PACK, KIND_TENSOR, Record
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.saving.commit import WrittenSave
from dcp_nvcomp.storage.base import Filesystem

_ROW = np.dtype([("record", "<u8"), ("crc", "<u4")])
Rows = npt.NDArray[np.void]


@dataclass(frozen=True)
class WrittenPart:
    """A save that is complete in itself."""

    written: WrittenSave  # what it consists of; its files are named by the places of their ranks in `ranks`
    ranks: tuple[int, ...]  # the ranks that made it
    seconds: float  # how long the slowest of them took

    def files_of(self, rank: int) -> dict[str, int]:
        return {name: self.written.files[name] for name, writer in self.senders().items() if writer == rank}

    def senders(self) -> dict[str, int]:
        places = {name: data_file_rank(name) for name in self.written.files}
        return {name: self.ranks[place] for name, place in places.items() if place is not None}


def written_by(
    ranks: Ranks, replicas: Sequence[Sequence[int]], written: WrittenSave | None, seconds: float
) -> list[WrittenPart]:
    """Tell all ranks what was written; all ranks call this."""
    if not replicas:
        return [WrittenPart(ranks.share(written), tuple(range(ranks.count)), seconds)]
    found, parts = ranks.gather((written, seconds)), []
    for replica in replicas:
        own = found[replica[0]][0]
        assert own is not None, "the first rank of a group publishes what it saves"
        parts.append(WrittenPart(own, tuple(replica), max(found[rank][1] for rank in replica)))
    return parts


@dataclass(frozen=True)
class Compared:
    """What came of it."""

    differing: tuple[str, ...]  # the tensors that replicas have saved with different values
    is_complete: bool  # False if replicas have divided something differently, which so could not be compared


def compared(
    ranks: Ranks, replicas: Sequence[Sequence[int]], filesystem: Filesystem, files: Mapping[str, int]
) -> Compared:
    """Compare what replicas have saved; all ranks call this.

    Tensors are compared shard by shard, and the small ones that share blocks together. Other values are not: pickles of
    equal objects may differ.
    """
    names: dict[int, list[str]] = {}
    crcs: dict[int, int] = {}

    def read() -> None:
        for name, nbytes in files.items():
            footer = read_footer(filesystem, find_data_file(filesystem, name, nbytes))
            for number, fqns, crc in _crcs(footer):
                names[number], crcs[number] = fqns, crc

    ranks.together(read)
    rows = ranks.gather(np.array(sorted(crcs.items()), _ROW).tobytes())
    by_replica = [np.concatenate([np.frombuffer(rows[rank], _ROW) for rank in one]) for one in replicas]
    differing = _differing(by_replica)
    records = [set(one["record"].tolist()) for one in by_replica]
    if not differing:
        return Compared((), all(one == records[0] for one in records))
    mine = {fqn for at in differing & names.keys() for fqn in names[at]}
    return Compared(tuple(sorted(set().union(*ranks.gather(mine)))), is_complete=True)


def _differing(replicas: Sequence[Rows]) -> set[int]:
    known: dict[int, int] = {}
    differing = set()
    for rows in replicas:
        for record, crc in rows.tolist():
            if known.setdefault(record, crc) != crc:
                differing.add(record)
    return differing


def _crcs(footer: Footer) -> Iterator[tuple[int, list[str], int]]:
    """Yield number, names and CRC of each tensor, or of those that lie in one pack."""
    members: dict[int, list[Record]] = {}
    for record in footer.records:
        if record.pack is not None:
            members.setdefault(record.pack[0], []).append(record)
    for at, record in enumerate(footer.records):
        if record.grid is None or record.kind not in (KIND_TENSOR, KIND_PACK):
            continue
        inside = members.get(at, []) if record.kind == KIND_PACK else [record]
        shape = record.grid.block_shape  # CRCs are of blocks, so these have to be cut alike
        blocks = slice(record.first_block, record.first_block + record.block_count)
        identity = ([_identity(one) for one in inside], record.element.name, shape)
        digest = hashlib.sha256(repr(identity).encode()).digest()
        crc = checksum(footer.tables.uncompressed_crc[blocks].astype("<u4").view(np.uint8))
        yield int.from_bytes(digest[:8], "little"), [one.fqn for one in inside], crc


def _identity(record: Record) -> tuple[object, ...]:
    first_element = None if record.pack is None else record.pack[1]
    return record.kind, record.fqn, record.offsets, record.shape, record.global_shape, first_element
