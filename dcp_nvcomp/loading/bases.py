"""The blocks that derived ones need: those of their base, from memory, from the same read, or by a read of their own.

A load that wants a weight and its master has mostly placed the weight when the master comes, which follows it in
the file. So it is looked for there first, and taken if its CRC is right: another thread may still be writing it, or the
planner may have changed it. What is needed for the rest of a read is then fetched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from dcp_nvcomp.codecs.base import U8, ScratchArrays, checksum
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.errors import CheckpointError, FormatError
from dcp_nvcomp.format.block_grid import alone
from dcp_nvcomp.format.data_file import block_row
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.record import MAX_ENCODED_NBYTES, Record
from dcp_nvcomp.loading.read_plan import GAP_NBYTES, BlockRead, Read, coalesce
from dcp_nvcomp.storage.reread import retry_if_corrupt

_LEAST_TOGETHER_NBYTES = 1 << 20


@dataclass(frozen=True)
class Base:
    """A block that another one is derived from."""

    record: Record
    number: int  # its row in the block table
    start: int  # its first byte in the file
    stop: int


def base_of(footer: Footer, record: Record, number: int) -> Base | None:
    """Return the block that one of a record, block `number`, is derived from; None if it can be decoded alone."""
    if record.base is None:
        return None
    assert record.chain is not None
    if not record.chain.array_to_bytes.needs_base(int(footer.tables.flags[number])):
        return None
    base = footer.records[record.base]
    at = base.first_block + number - record.first_block
    start, stop = footer.block_offsets[at : at + 2].tolist()
    return Base(base, at, start, stop)


class StoredBases:
    """The stored bytes of the blocks that others, read together, are derived from.

    Args:
        footer: of the file.
        start: where in the file `data` begins.
        data: what was read.
        blocks: record and number of those in it that are likely to need a base, in the order in which they will.
        read: reads a range of the file.
    """

    def __init__(
        self,
        footer: Footer,
        start: int,
        data: memoryview,
        blocks: Sequence[tuple[Record, int]],
        read: Callable[[int, int], bytes],
    ) -> None:
        self._footer, self._read = footer, read
        self._later = iter(blocks)
        self._fetched = [(start, data)]
        self._most_nbytes = max(len(data), _LEAST_TOGETHER_NBYTES)

    def decode(self, base: Base, engine: CpuEngine, out: U8, *, verify: str) -> None:
        """Decode a base; one that is corrupt is read once more."""
        record, row = base.record, block_row(self._footer, base.number)
        assert record.chain is not None
        decode = partial(engine.decode, row=row, chain=record.chain, out=out, verify=verify)
        with located(record.fqn, base.start, base.stop, self._footer.path):
            if base.stop - base.start > MAX_ENCODED_NBYTES:
                raise FormatError("The footer gives a block more bytes than any block can have.")
            retry_if_corrupt(
                lambda: decode(self._stored(base)),
                lambda: decode(memoryview(self._read(base.start, base.stop))),
            )

    def _stored(self, base: Base) -> memoryview:
        found = self._find(base)
        if found is None:
            self._fetch(base)
            found = self._find(base)
        assert found is not None
        return found

    def _find(self, base: Base) -> memoryview | None:
        for start, data in self._fetched:
            if start <= base.start and base.stop <= start + len(data):
                return data[base.start - start : base.stop - start]
        return None

    def _fetch(self, base: Base) -> None:
        """Fetch a base, and of those that will be needed after it no more than was read of what needs them."""
        wanted, nbytes = {base.number: base}, base.stop - base.start
        del self._fetched[1:]
        for record, number in self._later:
            other = base_of(self._footer, record, number)
            if other is None or other.number in wanted or self._find(other) is not None:
                continue
            nbytes += other.stop - other.start
            if nbytes > self._most_nbytes:
                break  # it is fetched alone when it is needed
            wanted[other.number] = other
        spans = [(one.start, one.stop) for one in wanted.values()]
        for span in coalesce(spans, GAP_NBYTES, self._most_nbytes):
            self._fetched.append((span.start, memoryview(self._read(span.start, span.stop))))


class LoadedBase(NamedTuple):
    """What a block is derived from, and how much of the block has to be verified then."""

    data: U8
    verify: str


class LoadedBases:
    """The decoded bases of one thread of a load, read by read."""

    def __init__(self, engine: CpuEngine, verify: str, read: Callable[[str, int, int], bytes]) -> None:
        self._engine, self._verify, self._read_file = engine, verify, read
        self._scratch = ScratchArrays()
        self._of_read: tuple[Read, StoredBases] | None = None
        self.fetched_nbytes = 0

    def of(self, block: BlockRead, read: Read, data: memoryview) -> LoadedBase | None:
        """Return what a block needs, valid until the next call; None if it needs nothing."""
        base = base_of(read.footer, block.record, block.number)
        if base is None:
            return None
        out: U8 = self._scratch.array("base", int(read.footer.block_nbytes[base.number]), np.uint8)
        if _copy_loaded(read, base, out):
            return LoadedBase(out, "full")  # one in 2^32 of what is no weight of this file has its CRC too
        if self._of_read is None or self._of_read[0] is not read:
            blocks = [(one.record, one.number) for one in read.blocks if not self._is_loaded(one, read)]
            stored = StoredBases(read.footer, read.start, data, blocks, partial(self._fetch, read.name))
            self._of_read = read, stored
        self._of_read[1].decode(base, self._engine, out, verify=self._verify)
        return LoadedBase(out, self._verify)

    def _is_loaded(self, block: BlockRead, read: Read) -> bool:
        """Return True if what a block needs is in memory."""
        base = base_of(read.footer, block.record, block.number)
        if base is None:
            return True
        out = self._scratch.array("another", int(read.footer.block_nbytes[base.number]), np.uint8)
        return _copy_loaded(read, base, out)

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        self.fetched_nbytes += stop - start
        return self._read_file(name, start, stop)

    def forget(self) -> None:
        """Free what was fetched for a read."""
        self._of_read = None


def _copy_loaded(read: Read, base: Base, out: U8) -> bool:
    """Copy a block from where it was loaded to; return True if it is there."""
    block = read.wanted.get(base.number)
    if block is None:
        return False
    for target in block.targets:
        direct = target.destination.direct(alone(block.box)) if target.is_resolved else None
        if direct is not None:
            np.copyto(out.reshape(direct.rows.shape), direct.rows)
            return checksum(out) == int(read.footer.tables.uncompressed_crc[base.number])
    return False


@contextmanager
def located(fqn: str, start: int, stop: int, path: str) -> Iterator[None]:
    """Add the file, the key and the bytes of a block to an error."""
    try:
        yield
    except CheckpointError as error:
        error.path, error.fqn, error.byte_range = path, fqn, (start, stop)
        raise
