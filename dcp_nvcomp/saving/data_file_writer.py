"""One data file, written front to back: header, blocks, footer, trailer."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.encoded import EncodedBlock, checksum
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.framing import (
    DIRECT_IO_NBYTES,
    HEADER_NBYTES,
    TRAILER_NBYTES,
    Tables,
    decode_trailer,
    encode_footer,
    encode_header,
)
from dcp_nvcomp.storage.base import OutputStream

__all__ = ["DataFileWriter"]


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

    def finish(self) -> DataFileRef:
        """Write the footer and the trailer.

        Returns:
            The file, as `.metadata` names it.
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
        return DataFileRef(self._name, file_nbytes, trailer.footer_nbytes, trailer.footer_crc)
