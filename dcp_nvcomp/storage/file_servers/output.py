"""One data file on its way to a file server, in parts: while one is on its way, the next is collected.

After a lost connection the file is opened again, and what the server had confirmed is read and compared before the rest
is sent: a server that was started again may have forgotten what it had not synced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.file_servers.content import Content
from dcp_nvcomp.storage.file_servers.pool import Pool
from dcp_nvcomp.storage.file_servers.publish import close_quietly, remove_quietly
from dcp_nvcomp.storage.file_servers.session import ConnectionLostError, RemoteFile, Session
from dcp_nvcomp.storage.parts import PartedOutput

_PARTS_ON_THEIR_WAY: Final = 2
PART_COPIES: Final = 2 * _PARTS_ON_THEIR_WAY + 1  # the one that is collected; of the others, the client has a copy


@dataclass
class _Part:
    """Bytes that the server has not confirmed yet.

    Attributes:
        start: where they are in the file.
        data: the bytes.
        begun: what the session returned when they were sent on the present connection; None before.
    """

    start: int
    data: bytes
    begun: Any = None


class ServerOutput(PartedOutput):
    """A new file."""

    def __init__(self, pool: Pool, path: str, where: str, part_nbytes: int) -> None:
        super().__init__(where, part_nbytes)
        self._pool, self._path = pool, path
        self._lease = pool.lease()
        self._file: RemoteFile | None = None
        self._parts: deque[_Part] = deque()
        self._nbytes = 0  # of all parts
        self._confirmed = Content()  # what the server has confirmed
        try:
            self._run("create", lambda session: None)
        except BaseException:
            self.abort()
            raise

    def _run(self, what: str, work: Callable[[Session], None]) -> None:
        def attempt(session: Session) -> None:
            if self._file is None or not session.owns(self._file):
                self._open(session)
            work(session)

        self._lease.run(what, self._where, attempt)

    def _open(self, session: Session) -> None:
        self._file = None
        for part in self._parts:
            part.begun = None
        may_be_ours, self._may_exist = self._may_exist, True
        try:
            file = session.create(self._path)
        except ConnectionLostError:
            raise
        except OSError as error:
            if not (may_be_ours and isinstance(error, FileExistsError)):
                self._may_exist = may_be_ours
                raise
            file = session.open_again(self._path)
        if not self._confirmed.begins(session, file):
            raise self._lost_bytes()
        self._file = file

    def _lost_bytes(self) -> StorageError:
        message = f"The server has confirmed {self._confirmed.nbytes} bytes, but after a lost connection it has others."
        return StorageError(message, path=self._where)

    def _send_part(self) -> None:
        self._add_part()
        self._run("write", lambda session: self._send(session, _PARTS_ON_THEIR_WAY))

    def _add_part(self) -> None:
        data = self._take_part()
        if data:
            self._parts.append(_Part(self._nbytes, data))
            self._nbytes += len(data)

    def _send(self, session: Session, most: int) -> None:
        """Send the parts that were not, and wait until no more than `most` are on their way."""
        assert self._file is not None
        for part in self._parts:
            if part.begun is None:
                part.begun = session.begin_write(self._file, part.start, part.data)
        while len(self._parts) > most:
            session.end_write(self._parts[0].begun)
            part = self._parts.popleft()
            self._confirmed = self._confirmed.followed_by(part.data)

    def _finish(self) -> None:
        self._add_part()
        self._run("write", self._complete)
        self._lease.release()

    def _complete(self, session: Session) -> None:
        self._send(session, 0)
        assert self._file is not None
        session.sync(self._file)
        found = session.nbytes(self._file)
        if found != self._nbytes:
            raise StorageError(f"The server was sent {self._nbytes} bytes, but has {found}.", path=self._where)
        session.close(self._file)

    @property
    def content(self) -> Content:
        """What the server has confirmed."""
        return self._confirmed

    def _discard(self) -> None:
        self._parts.clear()
        file, self._file = self._file, None
        if file is not None:
            close_quietly(self._pool, self._lease, file, self._where)
        self._lease.release(broken=True)
        if self._may_exist:
            remove_quietly(self._pool, self._path, self._where)
