"""What a verification finds: metadata against itself, footers against it, and a file's bytes against its CRCs."""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from rich.filesize import decimal
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_nvcomp.calls.tables import Shown, counted
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.tensors import dtype_name
from dcp_nvcomp.errors import CheckpointError, CodecUnavailableError, CorruptDataError, FormatError, StorageError
from dcp_nvcomp.format.data_file import DataFileRef, block_row, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.framing import HEADER_NBYTES, check_header
from dcp_nvcomp.format.metadata.rank_metadata import check_cover
from dcp_nvcomp.format.metadata.shards import Shard, ShardIndex, StoredAt, described, matches
from dcp_nvcomp.format.record import KIND_PACK, KIND_TENSOR, MAX_ENCODED_NBYTES, Record
from dcp_nvcomp.loading.bases import StoredBases, base_of
from dcp_nvcomp.loading.read_plan import coalesce
from dcp_nvcomp.maintenance.inspection import LAYOUT_STOCK
from dcp_nvcomp.maintenance.opening import as_json, document
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.reread import retry_if_corrupt

ERROR = "error"
WARNING = "warning"
READ_NBYTES = 8 << 20


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    severity: str
    what: str
    file: str | None = None  # the file's name in the checkpoint; None if no file is at fault
    fqns: tuple[str, ...] = ()
    byte_range: tuple[int, int] | None = None  # half-open range of bytes in the file, if known

    def __str__(self) -> str:
        where = [self.file] if self.file else []
        if self.byte_range is not None:
            where.append(f"bytes {self.byte_range[0]} to {self.byte_range[1]}")
        if self.fqns:
            where.append(f"key{'' if len(self.fqns) == 1 else 's'} " + ", ".join(map(repr, self.fqns)))
        return f"{self.severity.upper()} {', '.join(where)}: {self.what}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        values: dict[str, Any] = as_json(self)
        return values


# It does not answer. Others, such as EIO of a disk and EACCES, may be of one file.
_OF_THE_STORAGE: Final = frozenset(
    [
        *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN),
        *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
    ]
)


def finding_of(error: CheckpointError, file: str | None, fqns: tuple[str, ...] = ()) -> Finding:
    """Return the finding that an error is; raise it if the storage is at fault, which says nothing of the checkpoint.

    Each block would take as long as the time limit to fail, and a sound checkpoint would be reported as damaged.
    """
    if isinstance(error, StorageError) and error.errno in _OF_THE_STORAGE:
        raise error
    return Finding(ERROR, error.message, file, fqns or ((error.fqn,) if error.fqn else ()), error.byte_range)


@dataclass(frozen=True)
class Verification(Shown):
    """Result of `verify`.

    Attributes:
        path: the checkpoint.
        layout: `dcp_nvcomp`, `one file`, or `stock` for one that stock DCP wrote, which has no checksums of its own.
        save_id: id of the save, where there is one.
        full: whether blocks were decoded too.
        files: how many data files it has.
        nbytes: bytes of data files that were looked at.
        blocks: blocks whose stored bytes were looked at; of a stock checkpoint, items.
        undecoded_blocks: blocks that were to be decoded too, and could not be because only a GPU can (codec `ans`).
            Their stored bytes were checked.
        findings: what is wrong; empty if nothing is.
    """

    path: str
    layout: str
    save_id: str | None
    full: bool
    files: int
    nbytes: int
    blocks: int
    undecoded_blocks: int
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing but warnings was found."""
        return not any(finding.severity == ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values. Keys are only ever added to this document; `schema` changes if one must go."""
        return document(self, "checkpoint", sound=self.is_sound)

    def shown(self) -> Iterator[str]:
        """Return what it prints: what is wrong, and how much was checked."""
        yield from map(str, self.findings)
        is_stock = self.layout == LAYOUT_STOCK
        checked = f"{counted(self.blocks, 'item' if is_stock else 'block')}, {decimal(self.nbytes)} in "
        checked += f"{counted(self.files, 'data file')} checked"
        yield f"{self.path} is {'sound' if self.is_sound else 'DAMAGED'}: {checked}."
        if is_stock:
            yield "Stock DCP stores no checksums of its own, so some corruption can't be found."
        if self.undecoded_blocks:
            yield (
                f"{self.undecoded_blocks} of the blocks were not decoded, as that takes a GPU (codec ans); their "
                "stored bytes were checked."
            )


@dataclass(frozen=True)
class CheckedFile:
    """A data file whose footer and header are good."""

    name: str  # its name in the checkpoint
    footer: Footer  # its footer
    holders: tuple[Record, ...] = field(repr=False)  # the records that have blocks, in their order
    members: dict[int, list[Record]] = field(repr=False)  # the records in each pack, by the pack's first block

    def record_of(self, number: int) -> Record:
        return self.holders[bisect_right(self.holders, number, key=lambda record: record.first_block) - 1]

    def fqns_of(self, number: int) -> tuple[str, ...]:
        holder = self.record_of(number)
        if holder.kind != KIND_PACK:
            return (holder.fqn,)
        assert holder.grid is not None
        box = holder.grid.box(number - holder.first_block)  # a pack is one-dimensional
        start, stop = box.offsets[0], box.offsets[0] + box.sizes[0]
        inside = self.members.get(holder.first_block, ())
        return tuple(
            record.fqn
            for record in inside
            if record.pack is not None and record.pack[1] < stop and record.pack[1] + record.elements > start
        )


def open_file(filesystem: Filesystem, file: DataFileRef) -> CheckedFile:
    """Check a data file's size, footer and header."""
    footer = read_footer(filesystem, file)
    retry_if_corrupt(lambda: _check_header(filesystem, file.name, footer))
    members: dict[int, list[Record]] = {}
    for record in footer.records:
        if record.pack is not None:
            members.setdefault(footer.records[record.pack[0]].first_block, []).append(record)
    holders = tuple(record for record in footer.records if record.block_count)
    return CheckedFile(file.name, footer, holders, members)


def _check_header(filesystem: Filesystem, name: str, footer: Footer) -> None:
    """The bytes before the first block; piece by piece, as only the footer says how many they are."""
    data_offset = int(footer.block_offsets[0])
    for start in range(0, data_offset, READ_NBYTES):
        stop = min(start + READ_NBYTES, data_offset)
        data = filesystem.read(name, start, stop)
        if start == 0:
            check_header(data, path=footer.path)
        elif any(data):
            message = "Bytes that must be zero are not."
            raise CorruptDataError(message, path=footer.path, byte_range=(start, stop))
    assert data_offset >= HEADER_NBYTES  # parse_footer checked it


@dataclass(frozen=True)
class Span:
    """Blocks of a file that are read together."""

    file: CheckedFile
    start: int
    stop: int
    blocks: tuple[int, ...]


def spans_of(file: CheckedFile) -> Iterator[Span]:
    """All blocks of a file, in reads of at most `READ_NBYTES` or one block."""
    offsets = file.footer.block_offsets.tolist()
    for read in coalesce(list(pairwise(offsets)), 0, READ_NBYTES):
        yield Span(file, read.start, read.stop, read.pieces)


@dataclass(frozen=True)
class Checked:
    """Result of checking one span."""

    nbytes: int
    blocks: int
    undecoded_blocks: int
    findings: tuple[Finding, ...]


class BlockChecker:
    """Checks spans, several threads at once."""

    def __init__(self, filesystem: Filesystem, *, full: bool) -> None:
        self._filesystem = filesystem
        self._full = full
        self._engines = threading.local()

    def check(self, span: Span) -> Checked:
        """Check every block of a span; a block is judged by what a second read of it alone gives."""
        try:
            data = memoryview(b"") if span.stop - span.start > MAX_ENCODED_NBYTES else self._read(span)
        except CheckpointError:
            data = memoryview(b"")  # then block by block, as perhaps only one can't be read
        findings: list[Finding] = []
        undecoded, footer = 0, span.file.footer
        blocks = [(span.file.record_of(number), number) for number in span.blocks]
        bases = StoredBases(footer, span.start, data, blocks, partial(self._filesystem.read, span.file.name))
        for number in span.blocks:
            start, stop = (int(offset) for offset in footer.block_offsets[number : number + 2])
            alone = partial(self._is_good_alone, span.file, number, bases)
            part = data[start - span.start : stop - span.start]
            try:
                undecoded += not retry_if_corrupt(
                    partial(self._is_good, part, span.file, number, bases) if data else alone, alone
                )
            except CheckpointError as error:
                error.byte_range = error.byte_range or (start, stop)
                findings.append(finding_of(error, span.file.name, span.file.fqns_of(number)))
        return Checked(span.stop - span.start, len(span.blocks), undecoded, tuple(findings))

    def _read(self, span: Span) -> memoryview:
        return memoryview(self._filesystem.read(span.file.name, span.start, span.stop))

    def _is_good_alone(self, file: CheckedFile, number: int, bases: StoredBases) -> bool:
        """Read one block, and check it as `_is_good` does."""
        start, stop = (int(offset) for offset in file.footer.block_offsets[number : number + 2])
        if stop - start > MAX_ENCODED_NBYTES:
            raise FormatError("The footer gives a block more bytes than any block can have.")
        return self._is_good(memoryview(self._filesystem.read(file.name, start, stop)), file, number, bases)

    def _is_good(self, data: memoryview, file: CheckedFile, number: int, bases: StoredBases) -> bool:
        """Whether all that was to be checked could be; False where decoding takes a GPU."""
        row = block_row(file.footer, number)
        if not self._full:
            if checksum(data) != row.encoded_crc:
                raise CorruptDataError("The stored bytes fail their CRC: the file is corrupt.")
            return True
        engine = getattr(self._engines, "cpu", None)
        if engine is None:
            engine = self._engines.cpu = CpuEngine()
        record = file.record_of(number)
        chain, needed, base = record.chain, base_of(file.footer, record, number), None
        assert chain is not None
        if needed is not None:
            base = np.empty(int(file.footer.block_nbytes[needed.number]), np.uint8)
            bases.decode(needed, engine, base, verify="full")
        out = np.empty(int(file.footer.block_nbytes[number]), np.uint8)
        try:
            engine.decode(data, row, chain, out, verify="full", base=base)
        except CodecUnavailableError:
            return False
        return True


@dataclass(frozen=True)
class Expected:
    """One stored shard or Python object as metadata describes it."""

    fqn: str  # the key
    record: int  # the record's index in its file; -1 if stock DCP stored it
    is_tensor: bool  # False for a Python object
    shard: Shard | None  # its shard; None for a Python object, or if metadata lists no such shard


def expectations(metadata: Metadata) -> Iterator[tuple[Any, Expected]]:
    """Yield where each item is stored, and what it must be."""
    shards = ShardIndex(metadata.state_dict_metadata)
    for index, stored in metadata.storage_data.items():
        record = stored.record if isinstance(stored, StoredAt) else -1
        yield stored, Expected(index.fqn, record, shards.is_tensor(index.fqn), shards.find(index))


def _offsets(index: MetadataIndex, tensor: TensorStorageMetadata) -> torch.Size:
    return index.offset if index.offset is not None else torch.Size([0] * len(tensor.size))


def check_items(metadata: Metadata, name: str) -> list[Finding]:
    """Check that every listed shard is stored, every stored one listed, and no part of a tensor left out."""
    findings = []
    stored: dict[str, set[torch.Size]] = {}
    for index in metadata.storage_data:
        tensor = metadata.state_dict_metadata.get(index.fqn)
        offset = _offsets(index, tensor) if isinstance(tensor, TensorStorageMetadata) else torch.Size(())
        stored.setdefault(index.fqn, set()).add(offset)
    for fqn in sorted(stored.keys() - metadata.state_dict_metadata.keys()):
        findings.append(Finding(ERROR, "It is stored, but not listed among the keys.", name, (fqn,)))
    for fqn, tensor in metadata.state_dict_metadata.items():
        offsets = stored.get(fqn, set())
        if not isinstance(tensor, TensorStorageMetadata):
            if not offsets:
                findings.append(Finding(ERROR, "The metadata does not say where this object is stored.", name, (fqn,)))
            continue
        listed = {box.offsets for box in tensor.chunks}
        for offset in sorted(listed - offsets):
            what = f"The metadata does not say where the shard at {tuple(offset)} is stored."
            findings.append(Finding(ERROR, what, name, (fqn,)))
        for offset in sorted(offsets - listed):
            findings.append(Finding(ERROR, f"The metadata lists no shard at {tuple(offset)}.", name, (fqn,)))
        try:
            check_cover(tensor.size, [(box.offsets, box.sizes) for box in tensor.chunks])
        except CheckpointError as error:
            findings.append(Finding(ERROR, error.message, name, (fqn,)))
    return findings


def check_records(file: CheckedFile, expected: Sequence[Expected]) -> list[Finding]:
    """Check that a file has the records that metadata places there."""
    findings = []
    records = file.footer.records
    for one in expected:
        if not 0 <= one.record < len(records):
            what = f"The metadata names record {one.record}; the file has {len(records)}."
            findings.append(Finding(ERROR, what, file.name, (one.fqn,)))
            continue
        record = records[one.record]
        if (one.shard is None and one.is_tensor) or not matches(record, one.fqn, one.shard):
            what = f"The footer disagrees with the metadata: record {one.record} {described(record)}."
            findings.append(Finding(ERROR, what, file.name, (one.fqn,)))
        elif one.shard is not None and record.kind == KIND_TENSOR:
            dtype = dtype_name(one.shard.dtype)
            if record.element.name != dtype:
                what = f"It is stored as {record.element.name}, and `.metadata` says {dtype}."
                findings.append(Finding(WARNING, what, file.name, (one.fqn,)))
    return findings
