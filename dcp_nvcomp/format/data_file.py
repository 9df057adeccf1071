"""One data file: encoded blocks appended in order, the footer last; and the footer read back.

write   DataFileWriter: begin_record, add_block ..., finish -> the file tuple that `.metadata` names
read    read_footer(filesystem, file) -> Footer, checked against that tuple
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.encoded import BlockRow, EncodedBlock
from dcp_nvcomp.engines.cpu import checksum
from dcp_nvcomp.errors import FileMismatchError, TruncatedFileError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.footer import Footer, parse_footer
from dcp_nvcomp.format.framing import (
    DIRECT_IO_NBYTES,
    HEADER_NBYTES,
    MAX_FOOTER_NBYTES,
    TRAILER_NBYTES,
    Tables,
    decode_footer,
    decode_trailer,
    encode_footer,
    encode_header,
)
from dcp_nvcomp.storage.open import Filesystem, OutputStream
from dcp_nvcomp.storage.reread import twice

__all__ = ["DataFileWriter", "FileTuple", "block_row", "read_footer", "read_footer_of"]

# (name, file_nbytes, footer_nbytes, footer_crc), as `.metadata` names a data file
FileTuple = tuple[str, int, int, int]

_ZEROS = bytes(DIRECT_IO_NBYTES)


class DataFileWriter:
    """Writes one data file. Blocks must come in the order of their records.

    Args:
        stream: where the bytes go; the caller closes or aborts it.
        name: the file's name in the checkpoint.
        identity: what the footer says of the file: save_id, file_id, rank, writer.
        align: whether the first record begins at a multiple of 4096.
    """

    def __init__(self, stream: OutputStream, name: str, identity: dict[str, Any], *, align: bool) -> None:
        self._stream = stream
        self._name = name
        self._identity = identity
        self._data_offset = DIRECT_IO_NBYTES if align else HEADER_NBYTES
        self._position = self._data_offset
        self._chains: dict[str, int] = {}
        self._codecs: list[Any] = []
        self._records: list[dict[str, Any]] = []
        self._columns = tuple(array("I") for _ in range(4))
        self._slices = array("I")
        stream.write(encode_header(self._data_offset))

    def add_record(self, description: dict[str, Any], chain: CodecChain | None) -> int:
        """Begin a record.

        Args:
            description: its row of the footer, without the codec.
            chain: its codec chain; None for a record in a pack.

        Returns:
            Its index in the footer.
        """
        if chain is not None:
            described = chain.to_json()
            number = self._chains.setdefault(repr(described), len(self._codecs))
            if number == len(self._codecs):
                self._codecs.append(described)
            description = {**description, "codec": number}
        self._records.append(description)
        return len(self._records) - 1

    def add_block(self, block: EncodedBlock) -> int:
        """Append the next block of the last record.

        Returns:
            How many bytes it takes in the file.
        """
        self._stream.write(block.data)
        self._position += len(block.data)
        row = (len(block.data), block.row.flags, block.row.encoded_crc, block.row.uncompressed_crc)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        self._slices.extend(block.row.slice_nbytes)
        return len(block.data)

    def align(self) -> int:
        """Let the next record begin at a multiple of 4096: pads the last block with zero bytes, if there is one.

        Returns:
            How many bytes were added.
        """
        nbytes, _, crc, _ = self._columns
        gap = -self._position % DIRECT_IO_NBYTES
        if not gap or not nbytes:
            return 0
        padding = memoryview(_ZEROS)[:gap]
        self._stream.write(padding)
        self._position += gap
        nbytes[-1] += gap
        crc[-1] = checksum(padding, crc[-1])
        return gap

    def finish(self) -> FileTuple:
        """Write the footer and the trailer.

        Returns:
            The tuple by which `.metadata` names the file.
        """
        columns = [np.array(column, np.uint32) for column in (*self._columns, self._slices)]
        description = {
            **self._identity,
            "features": [],
            "data_offset": self._data_offset,
            "blocks": len(columns[0]),
            "slices": len(columns[4]),
            "codecs": self._codecs,
            "records": self._records,
        }
        tail = encode_footer(description, Tables(*columns), self._position)
        self._stream.write(tail)
        file_nbytes = self._position + len(tail)
        trailer = decode_trailer(tail[-TRAILER_NBYTES:], path=self._name, file_nbytes=file_nbytes)
        return self._name, file_nbytes, trailer.footer_nbytes, trailer.footer_crc


def block_row(footer: Footer, number: int) -> BlockRow:
    """The tables' rows of one block."""
    tables, starts = footer.tables, footer.slice_starts
    return BlockRow(
        int(tables.flags[number]),
        tuple(tables.slice_nbytes[starts[number] : starts[number + 1]].tolist()),
        int(tables.encoded_crc[number]),
        int(tables.uncompressed_crc[number]),
    )


def read_footer(filesystem: Filesystem, file: FileTuple) -> Footer:
    """Read a data file's footer and check that it is the file that `.metadata` names.

    Args:
        filesystem: the checkpoint.
        file: the tuple from `.metadata`.

    Returns:
        The checked footer.

    Raises:
        TruncatedFileError: the file is shorter than `.metadata` says.
        FileMismatchError: it is another file: of another save, swapped, or grown.
        FormatError: its footer breaks the format.
        CorruptDataError: its footer fails its CRC.
        StorageError: it is missing or can't be read.
    """
    name, file_nbytes, footer_nbytes, footer_crc = file
    path = filesystem.location(name)
    actual = filesystem.file_nbytes(name)
    if actual is not None and actual < file_nbytes:
        raise TruncatedFileError(f"The file has {actual} bytes; `.metadata` says {file_nbytes}.", path=path)
    if actual is not None and actual > file_nbytes:
        raise FileMismatchError(f"The file has {actual} bytes; `.metadata` says {file_nbytes}.", path=path)
    footer, trailer_crc, trailer_nbytes = twice(lambda: _read_tail(filesystem, name, file_nbytes, footer_nbytes))
    if (trailer_nbytes, trailer_crc) != (footer_nbytes, footer_crc):
        raise FileMismatchError(
            f"The file is whole, but not the one that `.metadata` names: it belongs to save {footer.save_id}. "
            "Data files were swapped or mixed between checkpoints.",
            path=path,
        )
    return footer


def read_footer_of(filesystem: Filesystem, name: str) -> Footer:
    """Read the footer of a data file without `.metadata`, by its trailer alone.

    Raises:
        TruncatedFileError, FormatError, CorruptDataError, StorageError: as `read_footer`.
    """
    file_nbytes = filesystem.file_nbytes(name) or 0
    return twice(lambda: _read_tail(filesystem, name, file_nbytes, 0))[0]


def _read_tail(filesystem: Filesystem, name: str, file_nbytes: int, footer_nbytes: int) -> tuple[Footer, int, int]:
    """Footer, and the CRC and size that the file itself gives for it. `footer_nbytes` is a guess that saves a read."""
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
