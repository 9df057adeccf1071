"""Encoded blocks, which engines make and take: host bytes, and their rows of the footer's tables.

An encoded block is a value of its own and may outlive the tensor. Engines know codecs and memory, never files or DCP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

# verify: "stored" checks each block's encoded CRC before a decoder sees it, "full" the decoded block's CRC too.


class BlockRow(NamedTuple):
    """One block's rows of the footer's tables."""

    flags: int
    slice_nbytes: tuple[int, ...]  # encoded size of each of its slices
    encoded_crc: int  # CRC32C of the encoded block
    uncompressed_crc: int  # CRC32C of the decoded block


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One encoded block."""

    data: memoryview  # its bytes on the host, a multiple of 16 long, valid as long as the buffer it was encoded into
    row: BlockRow  # its rows of the footer's tables
    uncompressed_nbytes: int
    was_wrong: bool = False  # True if a GPU encoded it to wrong bytes before; these are the CPU engine's


U8 = npt.NDArray[np.uint8]


_RELEASE_GIL = 1


def checksum(data: U8 | memoryview | bytes, value: int = 0) -> int:
    """Return the CRC32C of `data`, without holding the GIL. `value` is the CRC of the bytes before it."""
    return crc32c(data.data if isinstance(data, np.ndarray) else data, value, _RELEASE_GIL)
