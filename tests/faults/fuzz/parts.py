"""A data file as the fuzzer keeps it: its parts, so that a mutation need not get CRCs, sums and sizes right.

one byte    what is repaired, see the flags
u32, text   the footer's JSON
u32, ...    the footer's tables
the rest    what lies between header and footer
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from dcp_nvcomp.format.framing import FORMAT_VERSION, HEADER_NBYTES, TRAILER_MAGIC, encode_header

REPAIR_CRC = 1  # the footer's CRC
REPAIR_OFFSET = 2  # the footer begins where the blocks end
REPAIR_COUNTS = 4  # the JSON counts the blocks and slices that are in the tables
REPAIR_ALL = 7

_TRAILER_HEAD = struct.Struct("<QQQI")


@dataclass(frozen=True)
class Tail:
    """The end of a data file that may be longer than any disk: what is before it is never made."""

    offset: int
    data: bytes

    @property
    def file_nbytes(self) -> int:
        """Size of the whole file."""
        return self.offset + len(self.data)


@dataclass(frozen=True)
class FileParts:
    """See the module."""

    repair: int
    text: bytes
    tables: bytes
    blocks: bytes

    @staticmethod
    def split(data: bytes) -> FileParts:
        """The parts in a fuzzer's input; any input has some."""
        repair, position = (data[0] if data else 0), 1
        pieces = []
        for _ in range(2):
            nbytes = int.from_bytes(data[position : position + 4], "little")
            pieces.append(data[position + 4 : position + 4 + nbytes])
            position += 4 + nbytes
        return FileParts(repair, pieces[0], pieces[1], data[position:])

    def join(self) -> bytes:
        """The input that has these parts."""
        pieces = [struct.pack("<I", len(piece)) + piece for piece in (self.text, self.tables)]
        return bytes([self.repair]) + b"".join(pieces) + self.blocks

    def description(self) -> Any:
        """The JSON, or None where it is none."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    def tail(self) -> Tail:
        """Footer and trailer; repaired as far as `repair` says."""
        text = self.text
        description = self.description() if self.repair & (REPAIR_OFFSET | REPAIR_COUNTS) else None
        if isinstance(description, dict) and self.repair & REPAIR_COUNTS:
            text = self._with_counts(description, text)
        offset = HEADER_NBYTES + len(self.blocks)
        if isinstance(description, dict) and self.repair & REPAIR_OFFSET:
            offset = self._blocks_stop(description, offset)
        footer = text + bytes(-len(text) % 8) + self.tables
        head = _TRAILER_HEAD.pack(offset, len(footer), len(text), FORMAT_VERSION)
        crc = crc32c(head, crc32c(footer)) if self.repair & REPAIR_CRC else 0
        return Tail(offset, footer + head + struct.pack("<I", crc) + TRAILER_MAGIC)

    def _with_counts(self, description: dict[str, Any], text: bytes) -> bytes:
        columns = len(self.tables) // 4
        blocks = description.get("blocks")
        blocks = min(blocks, columns // 4) if type(blocks) is int and blocks >= 0 else columns // 4
        slices = columns - 4 * blocks
        if (description.get("blocks"), description.get("slices")) == (blocks, slices):
            return text
        try:
            return json.dumps({**description, "blocks": blocks, "slices": slices}).encode()
        except (ValueError, RecursionError):
            return text

    def _blocks_stop(self, description: dict[str, Any], otherwise: int) -> int:
        begin, blocks = description.get("data_offset"), description.get("blocks")
        if type(begin) is not int or type(blocks) is not int or not 0 <= begin < 1 << 60:
            return otherwise
        column = np.frombuffer(self.tables, "<u4", min(max(blocks, 0), len(self.tables) // 4))
        return begin + int(column.sum(dtype=np.int64))

    def file(self) -> bytes:
        """The whole file, if its footer begins where the blocks can end: cut off or filled up with zero bytes."""
        tail = self.tail()
        nbytes = min(tail.offset, 1 << 20)
        front = encode_header(HEADER_NBYTES) + self.blocks
        return front[:nbytes].ljust(nbytes, b"\0") + tail.data
