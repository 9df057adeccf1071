"""The data files of a rank: which items each of them holds, and how one is written."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.codecs.base import CodecChain, EncodedBlock, checksum
from dcp_nvcomp.codecs.encoded_run import EncodedRun
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.footer import FileIdentity, footer_json
from dcp_nvcomp.format.framing import (
    DIRECT_IO_NBYTES,
    HEADER_NBYTES,
    TRAILER_NBYTES,
    Tables,
    decode_trailer,
    encode_footer,
    encode_header,
)
from dcp_nvcomp.format.names import data_file_name
from dcp_nvcomp.format.record import Record
from dcp_nvcomp.saving.encode.sources import Member, PendingRecord
from dcp_nvcomp.saving.stats import Totals, component_of
from dcp_nvcomp.storage.base import OutputStream

# Records from here on begin at multiples of 4096 in the file.
LARGE_NBYTES = 1 << 20

_TOGETHER_NBYTES = 1 << 20
_ZEROS = bytes(DIRECT_IO_NBYTES)


@dataclass(frozen=True)
class PlannedFile:
    """A data file to write: its name and its items, the largest first, and each base before what is derived from it."""

    name: str
    items: tuple[WriteItem, ...]
    replaces: bool = False  # True if a file may have the name, which stays until this one is complete, or if it fails


def planned_nbytes(item: WriteItem) -> int:
    """Return the planned size of an item; 0 for bytes items, whose size is unknown until they are resolved."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def small_together(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield items in their order, as many at once as come to 1 MiB; bytes items, of unknown size, count as that."""
    together, nbytes = list[WriteItem](), 0
    for item in items:
        size = _TOGETHER_NBYTES if item.tensor_data is None else planned_nbytes(item)
        if together and nbytes + size > _TOGETHER_NBYTES:
            yield together
            together, nbytes = [], 0
        together.append(item)
        nbytes += size
    if together:
        yield together


def plan_files(
    units: Sequence[tuple[WriteItem, ...]],
    rank: int,
    file_id: str,
    *,
    single_file_per_rank: bool,
    streams: int,
    file_nbytes: int,
) -> list[list[PlannedFile]]:
    """Return the data files of a rank, by lane. The items of a unit share a file, one after the other."""
    if not units:
        return []
    sizes = [sum(map(planned_nbytes, unit)) for unit in units]
    if single_file_per_rank:
        count = file_count(sum(sizes), streams, file_nbytes)
        bins = distribute(sizes, count)
        return [
            [PlannedFile(data_file_name(rank, number, file_id), tuple(item for i in chosen for item in units[i]))]
            for number, chosen in enumerate(bins)
        ]
    lanes = distribute(sizes, min(streams, len(units)))
    return [[PlannedFile(data_file_name(rank, i, file_id), units[i]) for i in lane] for lane in lanes]


def file_count(total_nbytes: int, streams: int, file_nbytes: int) -> int:
    """Return the number of data files of a rank: one for each stream unless they would be tiny, and at least one."""
    return max(1, min(streams, total_nbytes // file_nbytes))


def distribute(sizes: Sequence[int], bins: int) -> list[list[int]]:
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    if bins == 1:
        return [order]
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, number) for number in range(bins)]
    for index in order:
        nbytes, number = heapq.heappop(heap)
        filled[number].append(index)
        heapq.heappush(heap, (nbytes + sizes[index], number))
    return filled


@dataclass(frozen=True)
class WrittenFile:
    """A data file as `.metadata` names it, and of each item in it DCP's index, encoded size and number of record."""

    file: DataFileRef
    items: Sequence[tuple[MetadataIndex, int, int]]


class DataFileWriter:
    """Writes one data file. Blocks must come in the order of their records."""

    def __init__(
        self, stream: OutputStream, name: str, identity: FileIdentity, progress: Callable[[int], None]
    ) -> None:
        self.stream = stream
        self.totals: dict[tuple[str, str, str], Totals] = {}  # by component, codec and dtype
        self._name = name
        self._identity = identity
        self._progress = progress
        self._data_offset = 0  # not known before the first record
        self._position = 0
        self._chains: dict[CodecChain, tuple[int, str]] = {}
        self._codecs: list[Any] = []
        self._records: list[dict[str, Any]] = []
        self._columns = tuple(array("I") for _ in range(4))
        self._slices = array("I")
        self._pending: PendingRecord | None = None
        self._before: Record | None = None  # the one that was begun last, which the next may be derived from
        self._base_row = self._first_row = 0  # of their first blocks, the one's before and its own
        self._label = ""
        self._encoded_nbytes = 0
        self._items: list[tuple[Member, int, int]] = []
        self._first_item = 0

    def begin(self, pending: PendingRecord) -> None:
        """Begin a record, and end the one before."""
        is_large = pending.nbytes >= LARGE_NBYTES
        self._write_header(is_large)
        self._end_record(is_large)
        codec, self._label = self._codec(pending.chain)
        record, before = pending.record, self._before
        self._base_row, self._first_row = self._first_row, len(self._columns[0])
        if pending.chain.array_to_bytes.has_base:
            assert before is not None and before.grid == record.grid, "its base is the record before"
            record = record._replace(base=len(self._records) - 1)
        self._before = None if pending.is_pack else record
        number = self.add_record(record, codec)
        self._pending, self._first_item = pending, len(self._items)
        if not pending.is_pack:
            self._items.append((pending.members[0], number, 0))
            return
        start = 0
        with collector_paused():
            for member in pending.members:
                self._items.append((member, self.add_record(member.record, (number, start)), 0))
                start += member.nbytes // member.record.element.nbytes

    def add_record(self, record: Record, place: int | tuple[int, int]) -> int:
        """Append a record to the footer and return its index there; `place` as for `Record.to_json`."""
        self._records.append(record.to_json(place))
        return len(self._records) - 1

    def _codec(self, chain: CodecChain) -> tuple[int, str]:
        found = self._chains.get(chain)
        if found is None:
            described = chain.to_json()
            if described not in self._codecs:  # chains that differ only in how they encode are one there
                self._codecs.append(described)
            found = self._chains[chain] = self._codecs.index(described), chain.label
        return found

    def append(self, blocks: Sequence[EncodedBlock]) -> None:
        """Append blocks of the record; their buffer may be used again afterwards."""
        if isinstance(blocks, EncodedRun):
            self._append_run(blocks)
            return
        for block in blocks:
            if block.base_crc is not None:
                self._check_base(block.base_crc)
            self.stream.write(block.data)
            self._position += len(block.data)
            self._encoded_nbytes += len(block.data)
            row = (len(block.data), block.row.flags, block.row.encoded_crc, block.row.uncompressed_crc)
            for column, value in zip(self._columns, row, strict=True):
                column.append(value)
            self._slices.extend(block.row.slice_nbytes)
            self._progress(block.uncompressed_nbytes)

    def _check_base(self, crc: int) -> None:
        """Refuse the next block if what it was derived from is not what was stored of that."""
        crcs = self._columns[3]
        if crcs[self._base_row + len(crcs) - self._first_row] != crc:
            assert self._pending is not None
            raise CheckpointError(
                "The weight that this master is derived from changed while both were saved. Let the save end before "
                "training goes on, or use async_save, which copies the state.",
                fqn=self._pending.record.fqn,
            )

    def _append_run(self, run: EncodedRun) -> None:
        self.stream.write(run.data)
        self._position += len(run.data)
        self._encoded_nbytes += len(run.data)
        found: list[npt.NDArray[Any]] = [run.encoded_nbytes, run.flags, run.encoded_crcs, run.crcs, run.slice_nbytes]
        for column, values in zip((*self._columns, self._slices), found, strict=True):
            column.frombytes(values.astype(np.uint32).tobytes())
        self._progress(run.uncompressed_nbytes)

    def finish(self) -> WrittenFile:
        self._write_header(False)
        self._end_record(False)
        tables = Tables(*(np.array(column, np.uint32) for column in (*self._columns, self._slices)))
        description = footer_json(self._identity, self._data_offset, tables, self._codecs, self._records)
        tail = encode_footer(description, tables, self._position)
        self.stream.write(tail)
        nbytes = self._position + len(tail)
        trailer = decode_trailer(tail[-TRAILER_NBYTES:], path=self._name, file_nbytes=nbytes)
        self.stream.close()
        return WrittenFile(
            DataFileRef(self._name, nbytes, trailer.footer_nbytes, trailer.footer_crc),
            [(member.item_index, nbytes, number) for member, number, nbytes in self._items],
        )

    def _write_header(self, is_large: bool) -> None:
        """Write the header before the first record, so that a large one begins at a multiple of 4096."""
        if not self._data_offset:
            self._data_offset = self._position = DIRECT_IO_NBYTES if is_large else HEADER_NBYTES
            self.stream.write(encode_header(self._data_offset))

    def _end_record(self, is_large_next: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        nbytes = pending.nbytes
        if nbytes:
            pending.choice.achieved(self._encoded_nbytes / nbytes)
        if is_large_next:
            self._align()
        encoded, begin = self._encoded_nbytes, 0
        by_component: dict[str, tuple[int, int, int]] = {}
        for at in range(self._first_item, len(self._items)):
            member, number, _ = self._items[at]
            end = begin + member.nbytes  # shares of a pack add up
            # an empty one may have the gap before the next record
            share = encoded * end // nbytes - encoded * begin // nbytes if nbytes else encoded
            begin = end
            self._items[at] = (member, number, share)
            component = component_of(member.item_index.fqn)
            count, before, after = by_component.get(component, (0, 0, 0))
            by_component[component] = (count + 1, before + member.nbytes, after + share)
        for component, sums in by_component.items():
            key = component, self._label, pending.dtype
            self.totals[key] = self.totals.get(key, Totals()) + Totals(*sums)
        self._pending, self._encoded_nbytes = None, 0

    def _align(self) -> None:
        """Pad the last block, if there is one, so that the next record begins at a multiple of 4096."""
        nbytes, _, crc, _ = self._columns
        gap = -self._position % DIRECT_IO_NBYTES
        if not gap or not nbytes:
            return
        padding = memoryview(_ZEROS)[:gap]
        self.stream.write(padding)
        self._position += gap
        self._encoded_nbytes += gap
        nbytes[-1] += gap
        crc[-1] = checksum(padding, crc[-1])
