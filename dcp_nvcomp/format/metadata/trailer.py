"""What follows the pickle of `.metadata`: its CRC. Unpicklers stop before it, so stock tools never see it."""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from dcp_nvcomp.errors import MetadataError

__all__ = ["checked_pickle", "has_trailer", "with_trailer"]

_TRAILER: Final = struct.Struct("<I8s")
_MAGIC: Final = b"DCPNVcrc"


def with_trailer(data: bytes) -> bytes:
    """Return a pickle followed by its CRC."""
    return b"".join([data, _TRAILER.pack(crc32c(data), _MAGIC)])


def has_trailer(data: bytes) -> bool:
    """Return whether a CRC follows the pickle. Stock DCP writes none."""
    return data.endswith(_MAGIC)


def checked_pickle(data: bytes) -> bytes:
    """Return the pickle without its CRC, which must match if there is one.

    Raises:
        MetadataError: it does not match.
    """
    if not has_trailer(data):
        return data
    crc, _ = _TRAILER.unpack(data[-_TRAILER.size :].rjust(_TRAILER.size))
    data = data[: -_TRAILER.size]
    if crc32c(data) != crc:
        raise MetadataError("`.metadata` fails its CRC: it is corrupt. `dcp-nvcomp recover` may restore it.")
    return data
