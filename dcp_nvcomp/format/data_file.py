"""Read the footer of a data file, and check it against what `.metadata` says of the file."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dcp_nvcomp.codecs.base import BlockRow
from dcp_nvcomp.codecs.encoded_run import EncodedRun
from dcp_nvcomp.errors import FileMismatchError, StorageError, TruncatedFileError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.footer import Footer, parse_footer
from dcp_nvcomp.format.framing import MAX_FOOTER_NBYTES, TRAILER_NBYTES, decode_footer, decode_trailer
from dcp_nvcomp.format.names import shared_directories
from dcp_nvcomp.storage.base import BESIDE, Filesystem
from dcp_nvcomp.storage.reread import retry_if_corrupt


class DataFileRef(NamedTuple):
    """A data file as `.metadata` names it, there as a plain tuple."""

    name: str  # its path, relative to the checkpoint
    nbytes: int
    footer_nbytes: int  # the size of its footer
    footer_crc: int  # the CRC of its footer: another file of the same name has another


def block_row(footer: Footer, number: int) -> BlockRow:
    """Return the tables' rows of one block."""
    tables, starts = footer.tables, footer.slice_starts
    return BlockRow(
        int(tables.flags[number]),
        tuple(tables.slice_nbytes[starts[number] : starts[number + 1]].tolist()),
        int(tables.encoded_crc[number]),
        int(tables.uncompressed_crc[number]),
    )


def encoded_run(footer: Footer, first: int, stop: int, data: memoryview) -> EncodedRun:
    """Return consecutive blocks, whose stored bytes are `data`, with their rows of the tables."""
    tables, slices = footer.tables, footer.slice_starts[first : stop + 1]
    return EncodedRun(
        data,
        footer.block_offsets[first : stop + 1] - footer.block_offsets[first],
        tables.flags[first:stop],
        tables.encoded_crc[first:stop],
        tables.uncompressed_crc[first:stop],
        footer.block_nbytes[first:stop],
        tables.slice_nbytes[slices[0] : slices[-1]].astype(np.int64),
        slices - slices[0],
    )


def find_data_file(filesystem: Filesystem, name: str, file_nbytes: int) -> DataFileRef:
    """Return a data file as `.metadata` would name it, of one that no `.metadata` names."""
    path = filesystem.location(name)
    tail = filesystem.read(name, max(file_nbytes - TRAILER_NBYTES, 0), file_nbytes)
    trailer = decode_trailer(memoryview(tail), path=path, file_nbytes=file_nbytes)
    return DataFileRef(name, file_nbytes, trailer.footer_nbytes, trailer.footer_crc)


def read_footer(filesystem: Filesystem, file: DataFileRef) -> Footer:
    """Read a data file's footer and check that it is the file that `.metadata` names."""
    name, file_nbytes, footer_nbytes, footer_crc = file
    path = filesystem.location(name)
    actual = filesystem.file_nbytes(name)
    if actual is None and name.startswith(BESIDE):
        raise StorageError(
            f"The checkpoint shares this file with {shared_directories([name])[0]!r}, beside it, and it is not there: "
            "was that one removed, or the checkpoint moved without it?",
            path=path,
            errno=errno.ENOENT,
        )
    if actual is not None and actual < file_nbytes:
        raise TruncatedFileError(f"The file has {actual} bytes; `.metadata` says {file_nbytes}.", path=path)
    if actual is not None and actual > file_nbytes:
        raise FileMismatchError(f"The file has {actual} bytes; `.metadata` says {file_nbytes}.", path=path)
    footer, trailer_crc, trailer_nbytes = retry_if_corrupt(
        lambda: _read_tail(filesystem, name, file_nbytes, footer_nbytes)
    )
    if (trailer_nbytes, trailer_crc) != (footer_nbytes, footer_crc):
        raise FileMismatchError(
            f"The file is whole, but not the one that `.metadata` names: it belongs to save {footer.save_id}. "
            "Data files were swapped or mixed between checkpoints.",
            path=path,
        )
    return footer


def read_footers(filesystem: Filesystem, files: Iterable[DataFileRef]) -> list[Footer]:
    """Return `read_footer` of each file, some at a time."""
    return filesystem.map(lambda file: read_footer(filesystem, file), files)


def _read_tail(filesystem: Filesystem, name: str, file_nbytes: int, footer_nbytes: int) -> tuple[Footer, int, int]:
    """Return the footer, and the CRC and size that the trailer gives for it; `footer_nbytes` saves a read if right."""
    path = filesystem.location(name)
    start = max(file_nbytes - TRAILER_NBYTES - min(footer_nbytes, MAX_FOOTER_NBYTES), 0)
    tail = memoryview(filesystem.read(name, start, file_nbytes))
    trailer_bytes = tail[-TRAILER_NBYTES:]
    trailer = decode_trailer(trailer_bytes, path=path, file_nbytes=file_nbytes)
    if trailer.footer_nbytes == footer_nbytes:
        text = tail[:footer_nbytes]
    else:
        text = memoryview(filesystem.read(name, trailer.footer_offset, file_nbytes - TRAILER_NBYTES))
    with collector_paused():
        description, tables = decode_footer(text, trailer_bytes, trailer, path=path)
        footer = parse_footer(description, tables, trailer, path=path)
    return footer, trailer.footer_crc, trailer.footer_nbytes
