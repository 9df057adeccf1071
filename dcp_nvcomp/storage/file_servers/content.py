"""What is in a file on a server, as short as a size and a checksum: two that are equal are taken for the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import crc32c

from dcp_nvcomp.storage.file_servers.session import RemoteFile, Session

_READ_NBYTES: Final = 8 << 20


@dataclass(frozen=True)
class Content:
    """Bytes of a file.

    Attributes:
        nbytes: how many.
        checksum: their CRC-32C.
    """

    nbytes: int = 0
    checksum: int = 0

    def followed_by(self, data: bytes | memoryview) -> Content:
        """Return these bytes and those after them."""
        return Content(self.nbytes + len(data), crc32c.crc32c(data, self.checksum))

    def begins(self, session: Session, file: RemoteFile) -> bool:
        """Return whether an open file begins with these bytes."""
        found = Content()
        buffer = memoryview(bytearray(min(self.nbytes, _READ_NBYTES)))
        while found.nbytes < self.nbytes:
            piece = buffer[: self.nbytes - found.nbytes]
            nbytes = session.read_into(file, found.nbytes, piece)
            found = found.followed_by(piece[:nbytes])
            if nbytes < len(piece):
                break
        return found == self

    def is_all_of(self, session: Session, path: str) -> bool:
        """Return whether there is a file of exactly these bytes."""
        if session.file_nbytes(path) != self.nbytes:
            return False
        file = session.open_to_read(path)
        is_ours = self.begins(session, file)
        session.close(file)
        return is_ours
