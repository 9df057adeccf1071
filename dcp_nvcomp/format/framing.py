"""Data-file framing of docs/format.md: header, trailer, footer. Pure: bytes in, values out, no IO, no torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import (
    CorruptDataError,
    FormatError,
    TruncatedFileError,
    UnsupportedVersionError,
    WrongMagicError,
)

FORMAT_VERSION = 1
HEADER_MAGIC = b"\x89DCPNV\r\n"
TRAILER_MAGIC = HEADER_MAGIC[::-1]
HEADER_NBYTES = 16
TRAILER_NBYTES = 40
DIRECT_IO_NBYTES = 4096  # records of 1 MiB or more begin at multiples of this
MAX_METADATA_NBYTES = 4 << 30  # by default, refuse to read a longer `.metadata` into memory
MAX_FOOTER_NBYTES = 1 << 30  # and a longer footer: a sparse file of any size costs its maker nothing

_HEADER = struct.Struct("<8sII")
_TRAILER_HEAD = struct.Struct("<QQQI")
_TRAILER_TAIL = struct.Struct("<I8s")

U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Tables:
    """The footer's columns."""

    encoded_nbytes: U32  # of each block, its padding included
    flags: U32
    encoded_crc: U32  # CRC32C of each encoded block
    uncompressed_crc: U32  # CRC32C of each decoded block
    slice_nbytes: U32  # encoded size of each slice


@dataclass(frozen=True)
class Trailer:
    """The fixed-size end of a data file."""

    footer_offset: int
    footer_nbytes: int
    json_nbytes: int
    footer_crc: int

    @property
    def file_nbytes(self) -> int:
        return self.footer_offset + self.footer_nbytes + TRAILER_NBYTES


def encode_header(data_offset: int) -> bytes:
    """Return the first `data_offset` bytes of a data file: header and zero bytes."""
    return _HEADER.pack(HEADER_MAGIC, FORMAT_VERSION, 0).ljust(data_offset, b"\0")


def check_header(header: bytes | memoryview, *, path: str) -> None:
    """Check the bytes before the first block."""
    if len(header) < HEADER_NBYTES:
        raise TruncatedFileError(f"The file has no header: only {len(header)} bytes come before its blocks.", path=path)
    magic, version, reserved = _HEADER.unpack_from(header)
    if magic != HEADER_MAGIC:
        raise WrongMagicError(
            "The file does not begin like a data file of this format: it is something else, or corrupt.",
            path=path,
            byte_range=(0, 8),
        )
    _check_version(version, path)
    if reserved or any(memoryview(header)[HEADER_NBYTES:]):
        raise CorruptDataError("Bytes that must be zero are not.", path=path, byte_range=(12, len(header)))


def _check_version(version: int, path: str) -> None:
    if version != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"The file has format version {version}; this reader knows version {FORMAT_VERSION}. Update dcp-nvcomp.",
            path=path,
        )


def encode_footer(description: dict[str, Any], tables: Tables, footer_offset: int) -> bytes:
    """Return footer and trailer of a data file."""
    text = json.dumps(description, separators=(",", ":")).encode()
    columns = (tables.encoded_nbytes, tables.flags, tables.encoded_crc, tables.uncompressed_crc, tables.slice_nbytes)
    footer = b"".join([text, bytes(-len(text) % 8), *(column.astype("<u4").tobytes() for column in columns)])
    head = _TRAILER_HEAD.pack(footer_offset, len(footer), len(text), FORMAT_VERSION)
    crc = crc32c(head, crc32c(footer))
    return footer + head + _TRAILER_TAIL.pack(crc, TRAILER_MAGIC)


def decode_trailer(tail: bytes | memoryview, *, path: str, file_nbytes: int) -> Trailer:
    """Read the trailer."""
    if len(tail) != TRAILER_NBYTES or file_nbytes < HEADER_NBYTES + TRAILER_NBYTES:
        raise TruncatedFileError(f"The file has only {file_nbytes} bytes, too few for a data file.", path=path)
    footer_offset, footer_nbytes, json_nbytes, version = _TRAILER_HEAD.unpack_from(tail)
    crc, magic = _TRAILER_TAIL.unpack_from(tail, _TRAILER_HEAD.size)
    if magic != TRAILER_MAGIC:
        raise WrongMagicError(
            "The file does not end like a data file of this format: it was cut off, or is something else.",
            path=path,
            byte_range=(file_nbytes - 8, file_nbytes),
        )
    _check_version(version, path)
    trailer = Trailer(footer_offset, footer_nbytes, json_nbytes, crc)
    if trailer.file_nbytes != file_nbytes or footer_offset < HEADER_NBYTES or json_nbytes > footer_nbytes:
        raise TruncatedFileError(
            f"The file has {file_nbytes} bytes, but {trailer.file_nbytes} according to its trailer.",
            path=path,
            byte_range=(file_nbytes - TRAILER_NBYTES, file_nbytes),
        )
    if footer_nbytes > MAX_FOOTER_NBYTES:
        raise FormatError(f"The footer has {footer_nbytes} bytes; at most {MAX_FOOTER_NBYTES} are read.", path=path)
    return trailer


def decode_footer(
    footer: bytes | memoryview, tail: bytes | memoryview, trailer: Trailer, *, path: str
) -> tuple[dict[str, Any], Tables]:
    """Check the footer's CRC and read its JSON and its tables."""
    span = (trailer.footer_offset, trailer.file_nbytes)
    if crc32c(bytes(tail[: _TRAILER_HEAD.size]), crc32c(footer)) != trailer.footer_crc:
        raise CorruptDataError("The footer fails its CRC: the file is corrupt.", path=path, byte_range=span)
    try:
        description = parse_json(bytes(footer[: trailer.json_nbytes]))
    except ValueError as error:
        raise FormatError(f"The footer's JSON can't be read: {error}.", path=path, byte_range=span) from error
    if not isinstance(description, dict):
        raise FormatError("The footer's JSON is not an object.", path=path, byte_range=span)
    blocks, slices = description.get("blocks"), description.get("slices")
    start = trailer.json_nbytes + -trailer.json_nbytes % 8
    if (
        type(blocks) is not int
        or type(slices) is not int
        or min(blocks, slices) < 0
        or start + 4 * (4 * blocks + slices) != trailer.footer_nbytes
    ):
        raise FormatError("The footer's tables do not have the size that it states.", path=path, byte_range=span)
    columns = np.frombuffer(footer, "<u4", 4 * blocks + slices, start)
    return description, Tables(*np.split(columns, [blocks, 2 * blocks, 3 * blocks, 4 * blocks]))
