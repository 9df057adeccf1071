"""Publish a small file: write it under a temporary name, and give it its own name in one step.

If the answer to that step gets lost, it was done if the temporary is gone and the file is what was written. If only the
temporary is gone, the server lost it, or another save has published since: what became of it is unknown.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import already_published
from dcp_nvcomp.storage.file_servers.content import Content
from dcp_nvcomp.storage.file_servers.pool import Lease, Pool
from dcp_nvcomp.storage.file_servers.session import ConnectionLostError, RemoteFile, Session
from dcp_nvcomp.storage.temporary import temporary_name

logger = logging.getLogger(__name__)


def publish(pool: Pool, path: str, data: bytes, where: str, *, overwrite: bool) -> None:
    """Write a small file atomically and durably."""
    temporary = temporary_name(path)
    try:
        pool.run("write", where, lambda session: _write(session, temporary, data))
    except BaseException:
        remove_quietly(pool, temporary, where)
        raise
    if overwrite:
        take_place(pool, temporary, path, where, Content().followed_by(data))
    else:
        _NewName(temporary, path, Content().followed_by(data), where).run(pool)


def take_place(pool: Pool, temporary: str, path: str, where: str, content: Content) -> None:
    """Let a file that was written under a temporary name take the place of another one, if there is one."""
    _Replacement(temporary, path, content, where).run(pool)


def remove_quietly(pool: Pool, path: str, where: str) -> None:
    """Remove a file that may be there: a failure harms nothing, so it must not hide what became of the rest."""

    def remove(session: Session) -> None:
        with contextlib.suppress(FileNotFoundError):
            session.remove(path)

    try:
        pool.run("remove", where, remove, deadline_seconds=pool.removal_seconds)
    except StorageError as error:
        logger.warning("Something of the unfinished %s may be left: %s", where, error)


def close_quietly(pool: Pool, lease: Lease, file: RemoteFile, where: str) -> None:
    """Close a file of which nothing is needed, so that the server forgets it: several share a connection."""

    def close(session: Session) -> None:
        if session.owns(file):
            session.close(file)

    if file.connection.is_alive:
        with contextlib.suppress(StorageError):
            lease.run("close", where, close, deadline_seconds=pool.removal_seconds)


def _write(session: Session, path: str, data: bytes) -> None:
    file = _new_or_ours(session, path)
    try:
        session.end_write(session.begin_write(file, 0, data))
        session.sync(file)
    except OSError:
        if file.connection.is_alive:
            with contextlib.suppress(OSError):
                session.close(file)
        raise
    session.close(file)


def _new_or_ours(session: Session, path: str) -> RemoteFile:
    try:
        return session.create(path)
    except FileExistsError:  # an earlier attempt made it, and its answer was lost: no other file has this name
        return session.open_again(path)


class _Move(ABC):
    """Gives a file its own name."""

    def __init__(self, source: str, target: str, content: Content, where: str) -> None:
        self._source, self._target, self._content, self._where = source, target, content, where
        self._is_repeated = False  # whether it may have been done already

    def run(self, pool: Pool) -> None:
        """Do it; if it fails, the temporary is removed."""
        try:
            pool.run("write", self._where, self._attempt, may_be_done=True)
        except BaseException:
            remove_quietly(pool, self._source, self._where)
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
        if session.look_up(self._source) is not None:
            return False
        if self._content.is_all_of(session, self._target):
            return True
        error = StorageError(
            "The connection was lost while the file got its name. It now has other contents: another save has "
            "published since, or the server has lost what it had confirmed.",
            path=self._where,
        )
        error.outcome_unknown = True
        raise error

    @abstractmethod
    def _try(self, session: Session) -> None:
        """Do it once."""


class _Replacement(_Move):
    """Gives a file a name that another may have, which is gone then."""

    def _try(self, session: Session) -> None:
        session.replace(self._source, self._target)


class _NewName(_Move):
    """Gives a file a name that no other may have."""

    def _try(self, session: Session) -> None:
        try:
            session.rename_new(self._source, self._target)
        except FileExistsError as error:
            # SFTP's rename makes a second name and then removes the first: it may have been interrupted between them
            if not (self._is_repeated and self._content.is_all_of(session, self._target)):
                raise already_published(self._where) from error
            session.remove(self._source)
