"""What is to be decoded on a device: one block, or a run of them; and what is checked on the host first.

Work is a `DecodeJob` or a `DecodeRun`. Both have `count`, `part` and `single`; a batch is a list of either, and
`Columns` are all of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dcp_nvcomp.codecs.base import ALIGNMENT_NBYTES, BlockRow, CodecChain, checksum, padded
from dcp_nvcomp.codecs.encoded_run import EncodedRun
from dcp_nvcomp.engines.cuda.batches import (
    I64,
    BatchLayout,
    BatchLayouts,
    ChainRuns,
    Layouts,
    lengths_of,
    padded_nbytes,
    split_width,
    starts_of,
)
from dcp_nvcomp.errors import CorruptDataError

U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One block to decode."""

    data: memoryview  # the encoded block in host memory
    row: BlockRow  # its rows of the footer's tables
    chain: CodecChain
    out: Tensor  # receives the block: 1-D contiguous uint8 on the device, exactly its decoded size
    path: str | None = None  # the file it is from, for messages
    fqn: str | None = None  # the state-dict key it is of, for messages
    byte_range: tuple[int, int] | None = None  # where in the file it lies, for messages

    @property
    def count(self) -> int:
        return 1

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def part(self, first: int, stop: int) -> DecodeJob:
        assert (first, stop) == (0, 1)
        return self

    def single(self, at: int) -> DecodeJob:
        assert at == 0
        return self


@dataclass(frozen=True, eq=False)
class DecodeRun:
    """Blocks of one record that follow each other in the file, and where they are decoded to."""

    encoded: EncodedRun
    chain: CodecChain
    out: Tensor  # receives them, one after the other: 1-D contiguous uint8 on the device
    path: str | None = None  # the file they are from, for messages
    fqn: str | None = None  # the state-dict key they are of, for messages
    offset: int = 0  # where in the file the first begins, for messages

    @property
    def count(self) -> int:
        return len(self.encoded)

    @property
    def nbytes(self) -> int:
        return len(self.encoded.data)

    @cached_property
    def starts(self) -> I64:
        """Where in `out` each block begins, and the end of the last."""
        return starts_of(self.encoded.nbytes)

    def part(self, first: int, stop: int) -> DecodeRun:
        """Return some of the blocks."""
        if (first, stop) == (0, self.count):
            return self
        begin, end = int(self.starts[first]), int(self.starts[stop])
        offset = self.offset + int(self.encoded.bounds[first])
        return replace(self, encoded=self.encoded[first:stop], out=self.out[begin:end], offset=offset)

    def single(self, at: int) -> DecodeJob:
        """Return one of the blocks."""
        one, (begin, end) = self.encoded[at], self.starts[at : at + 2].tolist()
        start, stop = (self.encoded.bounds[at : at + 2] + self.offset).tolist()
        return DecodeJob(one.data, one.row, self.chain, self.out[begin:end], self.path, self.fqn, (start, stop))


Work = DecodeJob | DecodeRun


def singles_of(works: Sequence[Work]) -> list[DecodeJob]:
    """Return a job for each block."""
    return [work.single(at) for work in works for at in range(work.count)]


@dataclass(frozen=True, eq=False)
class Columns:
    """All blocks of a batch."""

    runs: ChainRuns
    encoded_nbytes: I64  # of each block, as is all that follows
    nbytes: I64
    flags: I64
    encoded_crcs: U32
    crcs: U32  # of its bytes
    out: I64  # the address of its destination
    slice_nbytes: I64  # of each slice, its encoded length
    layout: BatchLayout | None = None  # if `JobChecks` has worked it out

    @staticmethod
    def of(works: Sequence[Work]) -> Columns:
        """Return the blocks of jobs and runs in their order; no object is made for a block of a run."""
        parts = [
            part
            for kind, same in groupby(works, type)
            for part in (map(_of_run, same) if kind is DecodeRun else [_of_jobs([*same])])  # type: ignore[arg-type,list-item]
        ]
        if len(parts) == 1:
            return parts[0]
        names = ("encoded_nbytes", "nbytes", "flags", "encoded_crcs", "crcs", "out", "slice_nbytes")
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return Columns(tuple([run for part in parts for run in part.runs]), **joined)

    def some(self, which: I64, slice_bounds: I64) -> Columns:
        """Return some of the blocks; `slice_bounds` are those of the layout of all."""
        chains = [chain for chain, count in self.runs for _ in range(count)]
        slices = np.repeat(np.arange(self.nbytes.size), lengths_of(slice_bounds))
        return Columns(
            tuple([(chains[at], 1) for at in which.tolist()]),
            self.encoded_nbytes[which],
            self.nbytes[which],
            self.flags[which],
            self.encoded_crcs[which],
            self.crcs[which],
            self.out[which],
            self.slice_nbytes[np.isin(slices, which)],
        )


def _of_run(run: DecodeRun) -> Columns:
    encoded = run.encoded
    return Columns(
        ((run.chain, run.count),),
        encoded.encoded_nbytes,
        encoded.nbytes,
        encoded.flags.astype(np.int64),
        encoded.encoded_crcs,
        encoded.crcs,
        run.starts[:-1] + run.out.data_ptr(),
        encoded.slice_nbytes,
    )


def _of_jobs(jobs: Sequence[DecodeJob]) -> Columns:
    same = [[*chains] for _, chains in groupby((job.chain for job in jobs), id)]
    return Columns(
        tuple([(chains[0], len(chains)) for chains in same]),
        np.array([job.data.nbytes for job in jobs], np.int64),
        np.array([job.out.numel() for job in jobs], np.int64),
        np.array([job.row.flags for job in jobs], np.int64),
        np.array([job.row.encoded_crc for job in jobs], np.uint32),
        np.array([job.row.uncompressed_crc for job in jobs], np.uint32),
        np.array([job.out.data_ptr() for job in jobs], np.int64),
        np.array([size for job in jobs for size in job.row.slice_nbytes], np.int64),
    )


def _refuse(job: DecodeJob, message: str) -> NoReturn:
    raise CorruptDataError(message, path=job.path, fqn=job.fqn, byte_range=job.byte_range)


class JobChecks:
    """Checks on the host, before a GPU sees a byte. Not for several threads at once."""

    def __init__(self) -> None:
        self._layouts = Layouts(every_plane=False)
        self._batches = BatchLayouts(every_plane=False)

    def check(self, job: DecodeJob) -> None:
        """Check a block; of `job.out` only the length matters.

        With `verify="off"` too: what a decoder on a GPU does with other bytes than an encoder wrote is not defined, and
        a fault there ends all work of the process on that GPU.
        """
        if checksum(job.data) != job.row.encoded_crc:
            _refuse(job, "The stored bytes fail their CRC: the file is corrupt.")
        codec = job.chain.array_to_bytes
        if not codec.check_flags(job.row.flags):
            _refuse(job, f"The block has flags {job.row.flags}, which its codec never writes.")
        if job.out.numel() % split_width(codec):
            _refuse(job, "The block is not a whole number of floats long.")
        layout = self._layouts.get(job.chain, job.out.numel(), job.row.flags)
        stored, decoded = job.row.slice_nbytes, layout.slice_nbytes
        if len(stored) != len(decoded):
            _refuse(job, "The block does not have the slices that its codec makes.")
        if any(not 1 <= nbytes <= most for nbytes, most in zip(stored, decoded, strict=True)):
            _refuse(job, "A slice does not fit into its block.")
        if sum(map(padded, stored)) + layout.stored_nbytes > job.data.nbytes:
            _refuse(job, "The block is shorter than its slices.")

    def columns_of(self, runs: Sequence[DecodeRun]) -> Columns | None:
        """Return all blocks of these runs if each would pass `check`, and one copy takes each run to a GPU; else None.

        But for the CRCs of the stored bytes, which the GPU compares before it decodes them: one core computes them at a
        sixth of the rate of the bus.
        """
        if any(run.out.numel() != run.starts[-1] for run in runs):
            return None
        columns = Columns.of(runs)
        if columns.flags.any() and any(run.encoded.flags.any() and not _has_valid_flags(run) for run in runs):
            return None
        widths = np.repeat([split_width(run.chain.array_to_bytes) for run in runs], [run.count for run in runs])
        if (columns.encoded_nbytes % ALIGNMENT_NBYTES).any() or (columns.nbytes % widths).any():
            return None
        layout = self._batches.get(columns.runs, columns.nbytes, columns.flags)
        slices = np.concatenate([lengths_of(run.encoded.slice_bounds) for run in runs])
        if not np.array_equal(lengths_of(layout.slice_bounds), slices):
            return None
        pieces = layout.pieces
        stored, decoded = columns.slice_nbytes, pieces.lengths[pieces.coded]
        if not ((stored >= 1) & (stored <= decoded)).all():
            return None
        lengths = pieces.lengths.copy()
        lengths[pieces.coded] = stored
        ends = starts_of(padded_nbytes(lengths))[pieces.bounds]
        return replace(columns, layout=layout) if (lengths_of(ends) <= columns.encoded_nbytes).all() else None


def _has_valid_flags(run: DecodeRun) -> bool:
    codec = run.chain.array_to_bytes
    return all(codec.check_flags(flags) for flags in np.unique(run.encoded.flags).tolist())
