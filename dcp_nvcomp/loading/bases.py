"""The blocks that derived ones need: those of their base, from memory, from the same read, or by a read of their own.

A load that wants a weight and its master has mostly placed the weight when the master comes, which lies behind it in
the file. So it is looked for there first, and taken if its CRC is right: another thread may still be writing it, or the
planner may have changed it. What is needed for the rest of a read is then fetched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from dcp_nvcomp.codecs.base import U8, ScratchArrays, checksum
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.block_grid import alone
from dcp_nvcomp.format.data_file import block_row
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.record import Record
from dcp_nvcomp.loading.read_plan import GAP_NBYTES, BlockRead, Read, coalesce
from dcp_nvcomp.storage.reread import twice

_MOST_TOGETHER_NBYTES = 16 << 20


@dataclass(frozen=True)
class Base:
    """A block that another one is derived from."""

    record: Record
    number: int  # its row in the block table
    start: int  # its first byte in the file
    stop: int


def base_of(footer: Footer, record: Record, number: int) -> Base | None:
    """Return the block that block `number`, one of a record, can't be decoded without; None if there is none."""
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
        blocks: record and number of those in it that are likely to need a base.
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
        self._footer, self._blocks, self._read = footer, blocks, read
        self._ranges = [(start, data)]

    def decode(self, base: Base, engine: CpuEngine, out: U8, *, verify: str) -> None:
        """Decode a base; one that is corrupt is read once more."""
        record, row = base.record, block_row(self._footer, base.number)
        assert record.chain is not None
        decode = partial(engine.decode, row=row, chain=record.chain, out=out, verify=verify)
        with located(record.fqn, base.start, base.stop, self._footer.path):
            twice(
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
        for start, data in self._ranges:
            if start <= base.start and base.stop <= start + len(data):
                return data[base.start - start : base.stop - start]
        return None

    def _fetch(self, base: Base) -> None:
        """Fetch a base, and those of the blocks that come later."""
        others = (base_of(self._footer, record, number) for record, number in self._blocks)
        later = [one for one in others if one is not None and one.number > base.number and self._find(one) is None]
        spans = [(one.start, one.stop) for one in (base, *later)]
        del self._ranges[1:]
        for span in coalesce(spans, GAP_NBYTES, _MOST_TOGETHER_NBYTES):
            self._ranges.append((span.start, memoryview(self._read(span.start, span.stop))))


class LoadedBases:
    """The decoded bases of one thread of a load, read by read."""

    def __init__(self, engine: CpuEngine, verify: str, read: Callable[[str, int, int], bytes]) -> None:
        self._engine, self._verify, self._read_file = engine, verify, read
        self._scratch = ScratchArrays()
        self._read: Read | None = None
        self._stored: StoredBases | None = None
        self.fetched_nbytes = 0

    def of(self, block: BlockRead, read: Read, data: memoryview) -> U8 | None:
        """Return what a block needs, valid until the next call; None if it needs nothing."""
        base = base_of(read.footer, block.record, block.number)
        if base is None:
            return None
        out: U8 = self._scratch.array("base", int(read.footer.block_nbytes[base.number]), np.uint8)
        if not _is_loaded(read, base, out):
            if self._stored is None or self._read is not read:
                blocks = [(one.record, one.number) for one in read.blocks if not self._is_loaded(one, read)]
                fetch = partial(self._fetch, read.name)
                self._read, self._stored = read, StoredBases(read.footer, read.start, data, blocks, fetch)
            self._stored.decode(base, self._engine, out, verify=self._verify)
        return out

    def _is_loaded(self, block: BlockRead, read: Read) -> bool:
        """Return True if what a block needs is in memory."""
        base = base_of(read.footer, block.record, block.number)
        if base is None:
            return True
        out = self._scratch.array("another", int(read.footer.block_nbytes[base.number]), np.uint8)
        return _is_loaded(read, base, out)

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        self.fetched_nbytes += stop - start
        return self._read_file(name, start, stop)

    def forget(self) -> None:
        """Free what was fetched for a read."""
        self._read = self._stored = None


def _is_loaded(read: Read, base: Base, out: U8) -> bool:
    """Copy a block from where it was loaded to, if it is there."""
    block, crc = read.wanted.get(base.number), int(read.footer.tables.uncompressed_crc[base.number])
    for target in block.targets if block is not None else ():
        direct = target.destination.direct(alone(block.box)) if block is not None and target.is_resolved else None
        if direct is not None:
            np.copyto(out.reshape(direct.rows.shape), direct.rows)
            return checksum(out) == crc
    return False


@contextmanager
def located(fqn: str, start: int, stop: int, path: str) -> Iterator[None]:
    """Add the file, the key and the bytes of a block to an error."""
    try:
        yield
    except CheckpointError as error:
        error.path, error.fqn, error.byte_range = path, fqn, (start, stop)
        raise
