"""The seam between what all file servers have in common and the clients of SFTP and SMB.

A `Connection` is one login. Work is done in a `Session`, which adds to it how long the server may be silent. What a
client raises becomes an OSError with an errno here, or one of the two errors below.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal


class ConnectionLostError(ConnectionError):
    """The connection broke, could not be made, or was silent for too long: nobody knows what the server has done."""

    def __init__(self, words: str, number: int = errno.ECONNRESET) -> None:
        super().__init__(number, words)


class LoginError(PermissionError):
    """The server, or what it says of itself, is not to be trusted, or it does not let this user in."""

    def __init__(self, words: str, number: int = errno.EACCES) -> None:
        super().__init__(number, words)


class HeldOpenError(OSError):
    """A file can't be replaced, or read, while somebody has it open: nothing was done."""

    def __init__(self, words: str) -> None:
        super().__init__(errno.EBUSY, words)


@dataclass(frozen=True)
class Entry:
    """What a name in a directory stands for.

    Attributes:
        name: the name.
        kind: links are not followed.
        nbytes: the size of a file.
        modified_seconds: when it was last written, by the server's clock.
    """

    name: str
    kind: Literal["file", "directory", "other"]
    nbytes: int
    modified_seconds: float


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """A file that is open on a connection, and is gone with it.

    Attributes:
        connection: the connection.
        path: the file.
        handle: what the client has of it.
    """

    connection: Connection
    path: str
    handle: Any


class Connection(ABC):
    """A login at a server.

    Attributes:
        users: for how many at once it is good.
    """

    users: int

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether nobody knows that it is broken."""

    @abstractmethod
    def session(self, silent_seconds: float) -> Session:
        """Return how one attempt uses it.

        Args:
            silent_seconds: how long the server may say nothing while it owes an answer.
        """

    @abstractmethod
    def cut(self) -> None:
        """End it at once, and do not wait for the server. Never raises."""


class Session(ABC):
    """What one attempt at some operation can ask of a server. Paths are those of the server, with `/`.

    Every method may raise ConnectionLostError, and an OSError for what the server refuses.
    """

    @abstractmethod
    def owns(self, file: RemoteFile) -> bool:
        """Return whether a file was opened on this connection."""

    @abstractmethod
    def open_to_read(self, path: str) -> RemoteFile:
        """Open a file; HeldOpenError if that can't be now."""

    @abstractmethod
    def create(self, path: str) -> RemoteFile:
        """Make a file, to be written and read; FileExistsError if there is one."""

    @abstractmethod
    def open_again(self, path: str) -> RemoteFile:
        """Open a file that `create` made, to be written and read."""

    @abstractmethod
    def read_into(self, file: RemoteFile, start: int, buffer: memoryview) -> int:
        """Fill a buffer with the bytes from `start` on; return how many there were, fewer only at the file's end."""

    @abstractmethod
    def begin_write(self, file: RemoteFile, start: int, data: bytes) -> Any:
        """Begin to write bytes at an offset, and return what `end_write` takes; others may be begun meanwhile."""

    @abstractmethod
    def end_write(self, begun: Any) -> None:
        """Return when the server has confirmed it."""

    @abstractmethod
    def sync(self, file: RemoteFile) -> None:
        """Make what was written durable, if the server can."""

    @abstractmethod
    def nbytes(self, file: RemoteFile) -> int:
        """Return the size of an open file."""

    @abstractmethod
    def close(self, file: RemoteFile) -> None:
        """Close it."""

    @abstractmethod
    def look_up(self, path: str) -> Entry | None:
        """Return what has this path, which may be a link; None if nothing has."""

    def file_nbytes(self, path: str) -> int | None:
        """Return the size of the file that a path leads to, by a link or without; None if it leads to none."""
        entry = self.look_up(path)
        return entry.nbytes if entry is not None and entry.kind == "file" else None

    @abstractmethod
    def list(self, path: str) -> list[Entry]:
        """Return what is in a directory."""

    @abstractmethod
    def replace(self, source: str, target: str) -> None:
        """Give a file another name, in one step, which may be another file's; HeldOpenError if that can't be now."""

    @abstractmethod
    def rename_new(self, source: str, target: str) -> None:
        """Give a file another name; FileExistsError if there is one."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file; FileNotFoundError if there is none."""

    @abstractmethod
    def make_directory(self, path: str) -> None:
        """Make a directory; FileExistsError if the name is taken."""

    @abstractmethod
    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    @abstractmethod
    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable, if the server can."""

    @abstractmethod
    def free_nbytes(self, path: str) -> int | None:
        """Return how much can still be written to the directory; None if the server does not tell."""
