"""Publish a small file: write it under a temporary name, and give it its own name in one step.

If the answer to that step gets lost, it was done exactly if the temporary is gone: nobody else touches that.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import already_published
from dcp_nvcomp.storage.file_servers.pool import Pool
from dcp_nvcomp.storage.file_servers.session import ConnectionLostError, RemoteFile, Session
from dcp_nvcomp.storage.temporary import temporary_name

__all__ = ["publish", "remove_quietly", "take_place"]

logger = logging.getLogger(__name__)


def publish(pool: Pool, path: str, data: bytes, where: str, *, overwrite: bool) -> None:
    """Write a small file atomically and durably.

    Args:
        pool: the server.
        path: the file there.
        data: all its bytes.
        where: its URL, for messages.
        overwrite: whether there may be one.

    Raises:
        ConcurrentSaveError: there is one, and there may not be.
    """
    temporary = temporary_name(path)
    try:
        pool.run("write", where, lambda session: _write(session, temporary, data))
    except BaseException:
        remove_quietly(pool, temporary, where)
        raise
    if overwrite:
        take_place(pool, temporary, path, where)
    else:
        _NewName(temporary, path, data, where).run(pool, where)


def take_place(pool: Pool, temporary: str, path: str, where: str) -> None:
    """Let a file that was written under a temporary name take the place of another one, if there is one."""
    _Replacement(temporary, path).run(pool, where)


def remove_quietly(pool: Pool, path: str, where: str) -> None:
    """Remove a file that may be there: a failure harms nothing, so it must not hide what became of the rest."""

    def remove(session: Session) -> None:
        with contextlib.suppress(FileNotFoundError):
            session.remove(path)

    try:
        pool.run("remove", where, remove, deadline_seconds=pool.removal_seconds)
    except StorageError as error:
        logger.warning("Something of the unfinished %s may be left: %s", where, error)


def _write(session: Session, path: str, data: bytes) -> None:
    file = _new_or_ours(session, path)
    session.end_write(session.begin_write(file, 0, data))
    session.sync(file)
    session.close(file)


def _new_or_ours(session: Session, path: str) -> RemoteFile:
    try:
        return session.create(path)
    except FileExistsError:  # an earlier attempt made it, and its answer was lost: no other file has this name
        return session.open_again(path)


class _Move(ABC):
    """Gives a file its own name.

    Args:
        source: its temporary name.
        target: its own.
    """

    def __init__(self, source: str, target: str) -> None:
        self._source, self._target = source, target
        self._is_repeated = False  # whether it may have been done already

    def run(self, pool: Pool, where: str) -> None:
        """Do it; if it fails, the temporary is removed."""
        try:
            pool.run("write", where, self._attempt, may_be_done=True)
        except BaseException:
            remove_quietly(pool, self._source, where)
            raise

    def _attempt(self, session: Session) -> None:
        try:
            if not (self._is_repeated and self._is_done(session)):
                self._try(session)
        except FileNotFoundError:  # it was done since we looked
            if not (self._is_repeated and self._is_done(session)):
                raise
        except ConnectionLostError:
            self._is_repeated = True
            raise
        self._is_repeated = True
        session.sync_directory(self._target.rpartition("/")[0])

    def _is_done(self, session: Session) -> bool:
        return session.look_up(self._source) is None

    @abstractmethod
    def _try(self, session: Session) -> None:
        """Do it once."""


class _Replacement(_Move):
    """Gives a file a name that another may have, which is gone then."""

    def _try(self, session: Session) -> None:
        session.replace(self._source, self._target)


class _NewName(_Move):
    """Gives a file a name that no other may have.

    Args:
        source: its temporary name.
        target: its own.
        data: what is in it.
        where: its URL, for messages.
    """

    def __init__(self, source: str, target: str, data: bytes, where: str) -> None:
        super().__init__(source, target)
        self._data, self._where = data, where

    def _try(self, session: Session) -> None:
        try:
            session.rename_new(self._source, self._target)
        except FileExistsError as error:
            # SFTP's rename makes a second name and then removes the first: it may have been interrupted between them
            if not (self._is_repeated and self._is_ours(session)):
                raise already_published(self._where) from error
            session.remove(self._source)

    def _is_ours(self, session: Session) -> bool:
        file = session.open_to_read(self._target)
        found = bytearray(len(self._data) + 1)
        nbytes = session.read_into(file, 0, memoryview(found))
        session.close(file)
        return found[:nbytes] == self._data
