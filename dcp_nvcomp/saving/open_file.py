"""Records into one data file: footer rows, alignment, and in the end what `.metadata` needs to know of each item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.codecs.encoded import EncodedBlock
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.saving.data_file_writer import DataFileWriter
from dcp_nvcomp.saving.encode.records import LARGE_NBYTES, Member, PendingRecord
from dcp_nvcomp.saving.stats import Totals
from dcp_nvcomp.storage.base import OutputStream

__all__ = ["OpenFile"]


class OpenFile:
    """A data file while it is written, and what its records came to.

    Args:
        stream: where it goes; the caller aborts it where `finish` was not reached.
        name: its name in the checkpoint.
        identity: what its footer says of the save.
        progress: called with the uncompressed size of what was written.

    Attributes:
        totals: codec name, dtype name and totals of each record that is complete.
    """

    def __init__(
        self, stream: OutputStream, name: str, identity: dict[str, Any], progress: Callable[[int], None]
    ) -> None:
        self.stream = stream
        self._name = name
        self._identity = identity
        self._progress = progress
        self._writer: DataFileWriter | None = None
        self._record: PendingRecord | None = None
        self._encoded_nbytes = 0
        self._items: list[tuple[Member, int, int]] = []
        self._first_item = 0
        self.totals: list[tuple[str, str, Totals]] = []

    def _writer_for(self, large: bool) -> DataFileWriter:
        if self._writer is None:
            self._writer = DataFileWriter(self.stream, self._name, self._identity, align=large)
        return self._writer

    def begin(self, record: PendingRecord) -> None:
        """Begin a record."""
        large = record.nbytes >= LARGE_NBYTES
        self._end_record(large)
        writer = self._writer_for(large)
        number = writer.add_record(record.row, record.chain)
        self._record, self._first_item = record, len(self._items)
        if not record.is_pack:
            self._items.append((record.members[0], number, 0))
            return
        start = 0
        for member in record.members:
            row = {**member.row, "pack": [number, start]}
            self._items.append((member, writer.add_record(row, None), 0))
            start += member.elements

    def append(self, blocks: Sequence[EncodedBlock]) -> None:
        """Append blocks of the record; their buffer is no longer needed then."""
        assert self._writer is not None
        for block in blocks:
            self._encoded_nbytes += self._writer.add_block(block)
            self._progress(block.uncompressed_nbytes)

    def _end_record(self, large_next: bool) -> None:
        if self._record is None or self._writer is None:
            return
        if large_next:
            self._encoded_nbytes += self._writer.align()
        record, encoded = self._record, self._encoded_nbytes
        self.totals.append((record.chain.label, record.dtype, Totals(len(record.members), record.nbytes, encoded)))
        for at in range(self._first_item, len(self._items)):
            member, number, _ = self._items[at]
            share = encoded * member.nbytes // record.nbytes if record.nbytes else 0
            self._items[at] = (member, number, share)
        self._record, self._encoded_nbytes = None, 0

    def finish(self) -> DataFileRef:
        """Write the footer, make the file durable."""
        self._end_record(False)
        file = self._writer_for(False).finish()
        self.stream.close()
        return file

    def results(self, file: DataFileRef) -> list[WriteResult]:
        """Return the place of each item as `.metadata` stores it: plain tuples, that of the file shared by all."""
        stored = tuple(file)
        return [WriteResult(member.index, nbytes, (stored, number)) for member, number, nbytes in self._items]
