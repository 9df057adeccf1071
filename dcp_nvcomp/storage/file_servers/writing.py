"""Write files on a file server: data files in parts, and small ones that are published in one step.

A lost connection does not fail a file: what was not confirmed is sent again. What was confirmed is read back and
compared once all is synced if a server that was started again may have forgotten it: a connection broke meanwhile, or
the file was written over one that began later than the file and is not the one that made it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import posixpath
import time
from collections.abc import Iterator
from typing import Final

from crc32c import crc32c

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import already_published, temporary_name
from dcp_nvcomp.storage.file_servers.client import Connection, ConnectionLostError, ServerClient
from dcp_nvcomp.storage.remote import PartedOutput

logger = logging.getLogger(__name__)

_READ_NBYTES: Final = 8 << 20


class ServerOutput(PartedOutput):
    """A new file; each part is one operation."""

    def __init__(self, client: ServerClient, path: str, where: str, part_nbytes: int) -> None:
        super().__init__(where, part_nbytes)
        self._client, self._path = client, path
        self._losses = client.losses()
        self._began_seconds = time.monotonic()
        self._first: Connection | None = None  # that made the file
        self._is_over_later = False  # whether another one was used that began later than the file
        self.nbytes = self.checksum = 0  # of what the server has confirmed
        try:
            client.run("create", where, self._create)
        except BaseException:
            self.abort()
            raise

    async def _create(self, connection: Connection) -> None:
        may_be_ours, self._may_exist = self._may_exist, True
        self._first = connection
        try:
            await connection.write(self._path, 0, b"", create=True)
        except ConnectionLostError:
            raise
        except OSError as error:
            if not (may_be_ours and isinstance(error, FileExistsError)):
                self._may_exist = may_be_ours
                raise

    def _send_part(self) -> None:
        self._send(sync=False)

    def _send(self, *, sync: bool) -> int:
        data, start = self._take_part(), self.nbytes

        async def write(connection: Connection) -> int:
            self._is_over_later |= connection is not self._first and connection.began_seconds > self._began_seconds
            return await connection.write(self._path, start, data, sync=sync)

        try:
            found = self._client.run("write", self._where, write)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                raise self._forgotten() from error
            raise
        self.nbytes += len(data)
        self.checksum = crc32c(data, self.checksum)
        return found

    def _finish(self) -> None:
        found = self._send(sync=True)
        may_be_forgotten = self._is_over_later or self._client.losses() != self._losses
        if found != self.nbytes or (may_be_forgotten and self._read_back() != self.checksum):
            raise self._forgotten()

    def _read_back(self) -> int:
        checksum = 0
        for start in range(0, self.nbytes, _READ_NBYTES):
            stop = min(start + _READ_NBYTES, self.nbytes)

            async def read(connection: Connection, start: int = start, stop: int = stop) -> bytes:
                return (await connection.read(self._path, start, stop))[0]

            checksum = crc32c(self._client.run("read back", self._where, read), checksum)
        return checksum

    def _forgotten(self) -> StorageError:
        message = f"The server has confirmed {self.nbytes} bytes, but after a lost connection it has others."
        return StorageError(message, path=self._where)

    def _discard(self) -> None:
        if self._may_exist:
            remove_quietly(self._client, self._path, self._where)


def publish(client: ServerClient, path: str, data: bytes, where: str, *, overwrite: bool) -> None:
    """Write a small file atomically and durably."""
    temporary = temporary_name(path)

    async def write(connection: Connection) -> None:
        try:
            await connection.write(temporary, 0, data, create=True, sync=True)
        except FileExistsError:  # an earlier attempt made it, and its answer was lost: no other file has this name
            await connection.write(temporary, 0, data, sync=True)

    with _removed_on_failure(client, temporary, where):
        client.run("write", where, write)
    move(client, temporary, path, where, len(data), crc32c(data), overwrite=overwrite)


def move(
    client: ServerClient, source: str, target: str, where: str, nbytes: int, checksum: int, *, overwrite: bool = True
) -> None:
    """Give a temporary file its own name in one step; if that fails, the temporary is removed.

    If the answer gets lost, it was done if the temporary is gone and the file is what was written. If only the
    temporary is gone, the server lost it, or another save has published since: the outcome is unknown.
    """
    is_repeated = False  # then it may have been done already
    is_named = False  # then it was

    async def is_ours(connection: Connection) -> bool:
        if await connection.file_nbytes(target) != nbytes:
            return False
        found = 0
        for start in range(0, nbytes, _READ_NBYTES):
            found = crc32c((await connection.read(target, start, min(start + _READ_NBYTES, nbytes)))[0], found)
        return found == checksum

    async def attempt(connection: Connection) -> None:
        nonlocal is_repeated, is_named
        may_be_done, is_repeated = is_repeated, True
        is_gone = may_be_done and await connection.look_up(source) is None
        if not is_gone:
            try:
                await (connection.replace if overwrite else connection.rename_new)(source, target)
            except FileNotFoundError:  # it was done since we looked
                if not may_be_done:
                    raise
                is_gone = True
            except FileExistsError as error:
                if overwrite:
                    raise
                # a link was made first, and the old name not removed: it may have been interrupted between them
                if not (may_be_done and await is_ours(connection)):
                    raise already_published(where) from error
                await connection.remove(source)
        if is_gone and not await is_ours(connection):
            raise _replaced_since(where)
        is_named = True
        await connection.sync_directory(posixpath.dirname(target))

    with _removed_on_failure(client, source, where):
        try:
            client.run("write", where, attempt, may_be_done=True)
        except StorageError as error:
            error.outcome_unknown |= is_named  # it is there, and may not survive a power failure
            raise


def _replaced_since(where: str) -> StorageError:
    error = StorageError(
        "The connection was lost while the file got its name. It now has other contents: another save has "
        "published since, or the server has lost what it had confirmed.",
        path=where,
    )
    error.outcome_unknown = True
    return error


@contextlib.contextmanager
def _removed_on_failure(client: ServerClient, path: str, where: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove_quietly(client, path, where)
        raise


def remove_quietly(client: ServerClient, path: str, where: str) -> None:
    """Remove a file that may be there: a failure harms nothing, so it must not hide what became of the rest."""

    async def remove(connection: Connection) -> None:
        with contextlib.suppress(FileNotFoundError):
            await connection.remove(path)

    try:
        client.run("remove", where, remove, deadline_seconds=client.removal_seconds)
    except StorageError as error:
        logger.warning("Something of the unfinished %s may be left: %s", where, error)
