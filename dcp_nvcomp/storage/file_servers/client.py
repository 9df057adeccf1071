"""What is asked of a file server, over connections that are used again until they break."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import fsspec.asyn

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.attempts import Attempts
from dcp_nvcomp.storage.base import REFUSALS

T = TypeVar("T")

if not hasattr(fsspec.asyn, "reset_after_fork"):  # before 2025.5: a forked process would wait for its parent's loop
    os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)


class ConnectionLostError(ConnectionError):
    """The connection broke or could not be made: what the server has done is unknown."""

    def __init__(self, words: str) -> None:
        super().__init__(errno.ETIMEDOUT, words)


class LoginError(PermissionError):
    """The server can't be trusted, or does not accept this user: trying again is of no use."""

    def __init__(self, words: str, number: int = errno.EACCES) -> None:
        super().__init__(number, words)


class HeldOpenError(OSError):
    """A file can't be replaced or read while another client has it open: nothing was done."""

    def __init__(self, words: str) -> None:
        super().__init__(errno.EBUSY, words)


@dataclass(frozen=True)
class Entry:
    """What a name in a directory stands for; links are not followed."""

    name: str
    kind: Literal["file", "directory", "other"]
    nbytes: int
    modified_seconds: float


class Connection(Protocol):
    """One login. Methods raise ConnectionLostError, or another OSError for what the server refuses.

    began_seconds: when its login began, by the monotonic clock
    write: into a file that exists, or with `create` must not; returns its size
    read: returns the bytes of a range, as far as the file has them, and its size
    rename_new: FileExistsError if the target exists
    look_up: links are not followed; None if there is nothing
    """

    began_seconds: float = 0.0

    @property
    def is_alive(self) -> bool: ...
    async def log_in(self, seconds: float) -> None: ...
    def cut(self) -> None: ...  # at once, without waiting for the server; never raises
    async def look_up(self, path: str) -> Entry | None: ...
    async def file_nbytes(self, path: str) -> int | None: ...  # links are followed
    async def list(self, path: str) -> list[Entry]: ...
    async def read(self, path: str, start: int, stop: int) -> tuple[bytes, int]: ...
    async def write(self, path: str, start: int, data: bytes, *, create: bool = False, sync: bool = False) -> int: ...
    async def replace(self, source: str, target: str) -> None: ...
    async def rename_new(self, source: str, target: str) -> None: ...
    async def remove(self, path: str) -> None: ...
    async def make_directory(self, path: str) -> None: ...
    async def remove_directory(self, path: str) -> None: ...
    async def sync_directory(self, path: str) -> None: ...
    async def free_nbytes(self, path: str) -> int | None: ...


class ServerClient(Attempts):
    """The connections to one server. Used by several threads; a forked process makes its own."""

    def __init__(
        self, connection: Callable[[], Connection], server: str, deadline_seconds: float, redact: Redactor
    ) -> None:
        super().__init__(fsspec.asyn.get_loop(), deadline_seconds, redact=redact)
        self._connection, self._name = connection, server
        self._inherited: list[list[Connection]] = []
        self._begin()

    def _begin(self) -> None:
        self._loop, self._process = fsspec.asyn.get_loop(), os.getpid()
        self._idle: list[Connection] = []
        self._lost = 0
        weakref.finalize(self, _cut_all, self._idle, self._process)

    def run(
        self,
        what: str,
        where: str,
        operation: Callable[[Connection], Awaitable[T]],
        *,
        may_be_done: bool = False,
        deadline_seconds: float | None = None,
    ) -> T:
        """Do something on any connection; `may_be_done` if it matters that the outcome of an attempt is unknown."""
        if self._process != os.getpid():
            self._inherited.append(self._idle)  # not collected: that would close the parent's connections
            self._begin()

        async def attempt() -> T:
            connection = await self._take()
            is_broken = True
            try:
                result = await operation(connection)
                is_broken = False
            except (CheckpointError, OSError) as error:
                is_broken = isinstance(error, ConnectionLostError)
                raise
            finally:
                self._give_back(connection, is_broken)
            return result

        try:
            return self.perform(what, where, attempt, deadline_seconds=deadline_seconds).value
        except StorageError as error:
            error.outcome_unknown &= may_be_done
            raise

    async def _take(self) -> Connection:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread has just taken the last one
                break
            if connection.is_alive:
                return connection
            self._lost += 1
        connection = self._connection()
        connection.began_seconds = time.monotonic()
        try:
            await connection.log_in(self.deadline_seconds / 3)
        except BaseException:
            connection.cut()
            raise
        return connection

    def _give_back(self, connection: Connection, is_broken: bool) -> None:
        if is_broken or not connection.is_alive:
            self._lost += 1
            connection.cut()
        else:
            self._idle.append(connection)

    def losses(self) -> int:
        """Return how many connections have broken so far."""
        return self._lost + sum(not connection.is_alive for connection in tuple(self._idle))

    def close(self) -> None:
        _cut_all(self._idle, self._process)

    def _is_transient(self, error: Exception) -> bool:
        return isinstance(error, ConnectionLostError | HeldOpenError | TimeoutError)

    def _is_answer(self, error: Exception) -> bool:
        return not self._is_transient(error)

    def may_be_done(self, error: Exception) -> bool:
        return getattr(error, "errno", None) not in REFUSALS

    def _server(self) -> str:
        return self._name

    def _failure(
        self, what: str, where: str, error: Exception, attempts: int, took: float, may_be_done: bool
    ) -> StorageError:
        failure = super()._failure(what, where, error, attempts, took, may_be_done)
        if isinstance(error, LoginError):
            failure.message = f"Could not {what}: {self._redact(error.strerror or '')}"
        return failure


def _cut_all(idle: list[Connection], process: int) -> None:
    with contextlib.suppress(IndexError):  # once there is none, or another thread has just taken the last one
        while process == os.getpid():
            idle.pop().cut()
