"""Connections to a server, each used again as long as it lives, and the loop that tries again on another one.

    pool.run("list", where, lambda session: ...)      one operation
    lease = pool.lease()                              several on the same connection, as long as it lives
    lease.run(...), lease.run(...), lease.release()

An operation ends when the server answers. If the connection breaks, or the server is silent for a third of the
deadline, the operation is begun anew on a new connection, with a new login, until the deadline.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.file_servers.session import Connection, ConnectionLostError, HeldOpenError, LoginError, Session

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SILENT_SHARE: Final = 1 / 3  # of the deadline: a silent server leaves time to ask again
_LEAST_SILENT_SECONDS: Final = 0.1
_REMOVAL_SECONDS: Final = 10.0  # leftovers do no harm: do not wait for another whole deadline after a failure
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
_HELD_PAUSE_SECONDS: Final = 0.05
_QUIET_SECONDS: Final = 10.0  # after that, retrying is worth a warning
# Errors after which it is certain that nothing was done.
_REFUSALS: Final = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EEXIST, errno.ENOTDIR),
    *(errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOTSUP, errno.ENOTEMPTY, errno.EBUSY),
)


class Pool:
    """The connections of one filesystem. Used by several threads; a forked process begins with none."""

    def __init__(
        self,
        connect: Callable[[float], Connection],
        deadline_seconds: float,
        *,
        most: int,
        redact: Redactor,
        server: str,
    ) -> None:
        self._connect, self._most, self.redact, self._server = connect, most, redact, server
        self.deadline_seconds = deadline_seconds
        self.removal_seconds = min(_REMOVAL_SECONDS, deadline_seconds)
        self._inherited: list[dict[Connection, int]] = []
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._used: dict[Connection, int] = {}  # by how many
        self._connecting = 0
        weakref.finalize(self, _cut_all, self._used, self._process)

    def _check_process(self) -> None:
        """Leave the connections of the process that this one was forked from to it."""
        if self._process != os.getpid():
            self._inherited.append(self._used)  # kept, as what is collected closes its socket with a warning
            self._begin()

    def lease(self) -> Lease:
        """Return the right to use one connection for more than one operation."""
        return Lease(self)

    def run(
        self,
        what: str,
        where: str,
        operation: Callable[[Session], T],
        *,
        may_be_done: bool = False,
        deadline_seconds: float | None = None,
    ) -> T:
        """Do something on any connection; see `Lease.run`."""
        lease = self.lease()
        try:
            return lease.run(what, where, operation, may_be_done=may_be_done, deadline_seconds=deadline_seconds)
        finally:
            lease.release()

    def close(self) -> None:
        """End the connections that nobody uses."""
        self._check_process()
        with self._changed:
            unused = [connection for connection, users in self._used.items() if not users]
            for connection in unused:
                del self._used[connection]
        for connection in unused:
            connection.cut()

    def take(self, seconds: float, silent_seconds: float) -> Connection:
        """Return a connection with room for one more user."""
        self._check_process()
        end = time.monotonic() + seconds
        with self._changed:
            while True:
                found = self._with_room()
                if found is not None:
                    self._used[found] += 1
                    return found
                if len(self._used) + self._connecting < self._most:
                    self._connecting += 1
                    break
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise ConnectionLostError(f"all connections to {self._server} are in use", errno.ETIMEDOUT)
        made = None
        try:
            made = self._connect(silent_seconds)
        finally:
            with self._changed:
                self._connecting -= 1
                if made is not None:
                    self._used[made] = 1
                self._changed.notify_all()
        return made

    def _with_room(self) -> Connection | None:
        for connection, users in list(self._used.items()):
            if not connection.is_alive:
                if not users:
                    del self._used[connection]
            elif users < connection.users:
                return connection
        return None

    def give_back(self, connection: Connection, *, broken: bool) -> None:
        """Take back what `take` returned; end it if it is of no use any more."""
        with self._changed:
            users = self._used.pop(connection, 0) - 1
            if users >= 0 and not broken:
                self._used[connection] = users
            self._changed.notify_all()
        if broken:
            connection.cut()


def _cut_all(used: dict[Connection, int], process: int) -> None:
    if process == os.getpid():
        for connection in list(used):
            connection.cut()


class Lease:
    """One user's hold on a connection; another connection takes its place when it breaks."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._connection: Connection | None = None
        self._process = os.getpid()

    def run(
        self,
        what: str,
        where: str,
        operation: Callable[[Session], T],
        *,
        may_be_done: bool = False,
        deadline_seconds: float | None = None,
    ) -> T:
        """Call `operation` until it succeeds, is refused, or time is up; also while somebody has the file open."""
        seconds = self._pool.deadline_seconds if deadline_seconds is None else deadline_seconds
        began = time.monotonic()
        attempts, unsure, warned = 0, False, False
        while True:
            attempts += 1
            left = began + seconds - time.monotonic()
            silent_seconds = max(min(seconds * _SILENT_SHARE, left), _LEAST_SILENT_SECONDS)
            try:
                return operation(self._hold(left, silent_seconds).session(silent_seconds))
            except CheckpointError:
                raise
            except ConnectionLostError as error:
                self._discard()
                unsure |= may_be_done
                took = time.monotonic() - began
                pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(attempts - 1, 10), _LONGEST_PAUSE_SECONDS)
                pause *= random.uniform(0.5, 1) if attempts > 1 else 0.0  # the first may only have been an old one
                if took + pause >= seconds:
                    raise self._failure(what, where, error, attempts, took, unsure) from self._pool.redact.error(error)
                words = self._pool.redact(str(error))
                logger.info("Could not %s %s, trying again: %s", what, where, words)
                if took > _QUIET_SECONDS and not warned:
                    warned = True
                    logger.warning("Still trying to %s %s after %.0f s: %s", what, where, took, words)
                time.sleep(pause)
            except HeldOpenError as error:  # by a reader, or a program that looks for viruses: not for long
                took = time.monotonic() - began
                if took + _HELD_PAUSE_SECONDS >= seconds:
                    raise self._failure(what, where, error, attempts, took, unsure) from self._pool.redact.error(error)
                time.sleep(_HELD_PAUSE_SECONDS)
            except OSError as error:
                unsure |= may_be_done and error.errno not in _REFUSALS
                took = time.monotonic() - began
                raise self._failure(what, where, error, attempts, took, unsure) from self._pool.redact.error(error)
            except BaseException:
                self._discard()  # an answer may still be on its way
                raise

    def _hold(self, left: float, silent_seconds: float) -> Connection:
        if self._process != os.getpid():
            self._connection, self._process = None, os.getpid()
        if self._connection is not None and not self._connection.is_alive:
            self._discard()
        if self._connection is None:
            self._connection = self._pool.take(left, silent_seconds)
        return self._connection

    def _discard(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection, broken=not connection.is_alive or connection.users == 1)

    def release(self, *, broken: bool = False) -> None:
        """Let go of the connection; nothing happens the second time."""
        connection, self._connection = self._connection, None
        if connection is not None and self._process == os.getpid():
            self._pool.give_back(connection, broken=broken and connection.users == 1)

    def __del__(self) -> None:
        self.release(broken=True)

    def _failure(self, what: str, where: str, error: OSError, attempts: int, took: float, unsure: bool) -> StorageError:
        tried = f", after {attempts} attempts in {took:.0f} s" if attempts > 1 else ""
        failure = StorageError.from_os_error(what, where, error, tried, redact=self._pool.redact)
        if isinstance(error, ConnectionLostError):
            failure.errno = errno.ETIMEDOUT
        if isinstance(error, LoginError):
            failure.message = f"Could not {what}: {self._pool.redact(error.strerror or '')}"
        failure.attempts = attempts
        failure.outcome_unknown = unsure
        return failure
