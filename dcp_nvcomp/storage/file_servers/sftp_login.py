"""A login at an SFTP server: asyncssh's connection on fsspec's event loop, whose one channel several threads share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncssh
import fsspec.asyn

from dcp_nvcomp.storage.file_servers.session import Connection, ConnectionLostError, LoginError
from dcp_nvcomp.storage.file_servers.sftp import SftpSession
from dcp_nvcomp.storage.file_servers.urls import SftpPlace

_USERS: Final = 8

if not hasattr(fsspec.asyn, "reset_after_fork"):  # before 2025.5: a forked process would wait for its parent's loop
    os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)


def connect(place: SftpPlace, silent_seconds: float) -> SftpConnection:
    """Log in."""
    loop = fsspec.asyn.get_loop()
    future = asyncio.run_coroutine_threadsafe(_connect(place, silent_seconds), loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _connect(place: SftpPlace, silent_seconds: float) -> SftpConnection:
    ssh = None
    try:
        async with _time_limit(silent_seconds, place.server):
            ssh = await asyncssh.connect(place.host, place.port, **place.client)
            sftp = await ssh.start_sftp_client(path_errors="surrogateescape")
        return SftpConnection(asyncio.get_running_loop(), ssh, sftp, place.server)
    except BaseException as error:
        if ssh is not None:
            ssh.abort()
        if isinstance(error, ConnectionLostError) or not isinstance(error, Exception):
            raise
        raise _login_failure(error, place) from error


def _is_lost(error: Exception) -> bool:
    """True if the connection ended while a channel was opened; a server that refuses the channel gives another code."""
    return isinstance(error, asyncssh.ChannelOpenError) and error.code == asyncssh.OPEN_CONNECT_FAILED


@contextlib.asynccontextmanager
async def _time_limit(seconds: float, server: str) -> AsyncIterator[None]:
    task = asyncio.current_task()
    assert task is not None
    late = False

    def cancel() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not late:
            raise
        raise ConnectionLostError(f"no answer from {server} within {seconds:.1f} s", errno.ETIMEDOUT) from None
    finally:
        timer.cancel()


def _login_failure(error: Exception, place: SftpPlace) -> OSError:
    """Return our error for a login that failed: one to be tried again, or not."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return LoginError(
            f"the host key of {place.server} is not among the known ones ({error}). If it is the right one, add it "
            f"to ~/.ssh/known_hosts or to the file that known_hosts= names, as `ssh-keyscan` prints it"
        )
    if isinstance(error, asyncssh.PermissionDenied):
        return LoginError(
            f"{place.server} does not let {place.user} in ({error}). Check username=, password= and client_keys=, or "
            "whether the SSH agent has the key"
        )
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        return LoginError(f"{place.server} is not known to the network ({error.strerror})", errno.EHOSTUNREACH)
    if isinstance(error, asyncssh.KeyImportError | asyncssh.KeyEncryptionError | ValueError | TypeError):
        return LoginError(f"a key or an option of the SSH client can't be used ({words})", errno.EINVAL)
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return LoginError(f"a file that the SSH client needs can't be read ({words})", errno.EINVAL)
    if isinstance(error, asyncssh.KeyExchangeFailed | asyncssh.ProtocolNotSupported | asyncssh.IllegalUserName):
        return LoginError(f"{place.server} and the SSH client do not understand each other ({words})")
    if isinstance(error, asyncssh.ChannelOpenError) and not _is_lost(error):
        return LoginError(f"{place.server} has no SFTP ({words})")
    return ConnectionLostError(words, getattr(error, "errno", None) or errno.ECONNREFUSED)


class SftpConnection(Connection):
    """A connection with one SFTP channel, which several threads share.

    Attributes:
        heard_seconds: when it last answered, by the monotonic clock.
        syncs_directories: whether it did.
    """

    users = _USERS

    def __init__(self, loop: asyncio.AbstractEventLoop, ssh: Any, sftp: Any, server: str) -> None:
        self.loop, self.ssh, self.sftp, self.server = loop, ssh, sftp, server
        self.heard_seconds = time.monotonic()
        self.syncs_directories = False
        self._is_cut = False

    @property
    def is_alive(self) -> bool:
        return not (self._is_cut or self.ssh.is_closed())

    def session(self, silent_seconds: float) -> SftpSession:
        return SftpSession(self, silent_seconds)

    def cut(self) -> None:
        self._is_cut = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.ssh.abort)
