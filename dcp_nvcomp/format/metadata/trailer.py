"""What follows the pickle of `.metadata`: its CRC. Unpicklers stop before it, so stock tools never see it."""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from dcp_nvcomp.errors import MetadataError

_TRAILER: Final = struct.Struct("<I8s")
_MAGIC: Final = b"DCPNVcrc"


def with_trailer(data: bytes) -> bytes:
    """Return a pickle followed by its CRC."""
    return b"".join([data, _TRAILER.pack(crc32c(data), _MAGIC)])


def has_trailer(data: bytes) -> bool:
    """Return whether a CRC follows the pickle. Stock DCP writes none."""
    return data.endswith(_MAGIC)


def end_of_pickle(data: bytes) -> int:
    """Return where the pickle ends, and its CRC begins, which must match if there is one."""
    if not has_trailer(data):
        return len(data)
    crc, _ = _TRAILER.unpack(data[-_TRAILER.size :].rjust(_TRAILER.size))
    end = max(len(data) - _TRAILER.size, 0)
    if crc32c(memoryview(data)[:end]) != crc:
        raise MetadataError("`.metadata` fails its CRC: it is corrupt. `dcp-nvcomp recover` may restore it.")
    return end
