"""SFTP, by asyncssh's client on fsspec's event loop.

OpenSSH's server answers "Failure" for most of what can go wrong, so its meaning is looked up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import posixpath
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import asyncssh

from dcp_nvcomp.storage.file_servers.client import Connection, ConnectionLostError, Entry, LoginError
from dcp_nvcomp.storage.file_servers.urls import ServerPlace

T = TypeVar("T")
P = ParamSpec("P")

_LOST: Final = (asyncssh.SFTPNoConnection, asyncssh.SFTPConnectionLost)
_ERRNO: Final = {
    asyncssh.FX_NO_SUCH_FILE: errno.ENOENT,
    asyncssh.FX_PERMISSION_DENIED: errno.EACCES,
    asyncssh.FX_BAD_MESSAGE: errno.EINVAL,  # what OpenSSH makes of EINVAL and ENAMETOOLONG
    asyncssh.FX_OP_UNSUPPORTED: errno.ENOTSUP,
    asyncssh.FX_NO_SUCH_PATH: errno.ENOENT,
    asyncssh.FX_FILE_ALREADY_EXISTS: errno.EEXIST,
    asyncssh.FX_WRITE_PROTECT: errno.EROFS,
    asyncssh.FX_NO_SPACE_ON_FILESYSTEM: errno.ENOSPC,
    asyncssh.FX_QUOTA_EXCEEDED: errno.EDQUOT,
    asyncssh.FX_DIR_NOT_EMPTY: errno.ENOTEMPTY,
    asyncssh.FX_NOT_A_DIRECTORY: errno.ENOTDIR,
    asyncssh.FX_FILE_IS_A_DIRECTORY: errno.EISDIR,
}


def _told(
    method: Callable[Concatenate[SftpConnection, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SftpConnection, P], Coroutine[Any, Any, T]]:
    """Let a method raise OSErrors instead of asyncssh's errors."""

    @functools.wraps(method)
    async def told(self: SftpConnection, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            return await method(self, *arguments, **options)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            if isinstance(error, asyncssh.SFTPError) and not isinstance(error, _LOST):
                raise OSError(_ERRNO.get(error.code, errno.EIO), words) from error
            if isinstance(error, UnicodeError):
                raise OSError(errno.EINVAL, words) from error
            if isinstance(error, asyncssh.Error | ConnectionError) and not isinstance(error, ConnectionLostError):
                raise ConnectionLostError(words) from error
            raise

    return told  # type: ignore[return-value]


class SftpConnection(Connection):
    """A connection with one SFTP channel."""

    def __init__(self, place: ServerPlace) -> None:
        self._place = place
        self._ssh: Any = None
        self._sftp: Any = None
        self._is_cut = False

    @property
    def is_alive(self) -> bool:
        return not (self._is_cut or self._ssh.is_closed())

    async def log_in(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._ssh = await asyncssh.connect(self._place.host, self._place.port, **self._place.client)
            self._sftp = await self._ssh.start_sftp_client(path_errors="surrogateescape")
        except Exception as error:
            raise _login_failure(error, self._place) from error

    def cut(self) -> None:
        self._is_cut = True
        if self._ssh is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ssh.abort)

    @contextlib.asynccontextmanager
    async def _file(self, path: str, mode: str) -> AsyncIterator[Any]:
        taken = errno.EEXIST if "x" in mode else errno.EIO
        async with self._explained(path, taken, taken):
            file = await self._sftp.open(path, mode)
        try:
            yield file
        except Exception:  # a connection whose operation was cancelled is cut, which closes its files
            if self.is_alive:
                with contextlib.suppress(asyncssh.Error):
                    await file.close()
            raise
        await file.close()

    @contextlib.asynccontextmanager
    async def _explained(self, path: str, file: int = errno.EIO, folder: int = errno.EIO) -> AsyncIterator[None]:
        """Give a "Failure" the errno for what has this path, a file or a folder, or for a disk that is full."""
        try:
            yield
        except asyncssh.SFTPFailure as error:
            entry = await self.look_up(path)
            number = errno.EIO if entry is None else folder if entry.kind == "directory" else file
            why = "the server does not say why"
            if number == errno.EIO:
                with contextlib.suppress(asyncssh.SFTPError):
                    disk = await self._sftp.statvfs(posixpath.dirname(path) or "/")
                    if disk.flags & asyncssh.FXE_STATVFS_ST_RDONLY:
                        number, why = errno.EROFS, "the server's disk is mounted read-only"
                    elif not disk.bavail or (disk.files and not disk.favail):
                        number, why = errno.ENOSPC, "the server's disk is full"
            raise OSError(number, f"{type(error).__name__}: {error} ({why})") from error

    @_told
    async def look_up(self, path: str) -> Entry | None:
        try:
            return _entry(posixpath.basename(path), await self._sftp.lstat(path))
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
            return None

    @_told
    async def file_nbytes(self, path: str) -> int | None:
        try:
            entry = _entry("", await self._sftp.stat(path))
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath, asyncssh.SFTPNotADirectory):
            return None
        return entry.nbytes if entry.kind == "file" else None

    @_told
    async def list(self, path: str) -> list[Entry]:
        async with self._explained(path, file=errno.ENOTDIR):
            found = await self._sftp.readdir(path)
        return [_entry(str(item.filename), item.attrs) for item in found if item.filename not in (".", "..")]

    @_told
    async def read(self, path: str, start: int, stop: int) -> tuple[bytes, int]:
        async with self._file(path, "rb") as file:
            nbytes = int(
                (await file.stat()).size or 0
            )  # a footer may claim any size: memory is taken for what there is
            data = await file.read(min(stop, nbytes) - start, start) if start < nbytes else b""
        return data, nbytes

    @_told
    async def write(self, path: str, start: int, data: bytes, *, create: bool = False, sync: bool = False) -> int:
        async with self._explained(path), self._file(path, "xb" if create else "r+b") as file:
            if data:
                await file.write(data, start)
            if sync:
                with contextlib.suppress(asyncssh.SFTPOpUnsupported):
                    await file.fsync()
            return int((await file.stat()).size or 0)

    @_told
    async def replace(self, source: str, target: str) -> None:
        try:
            async with self._explained(target, folder=errno.EISDIR):
                await self._sftp.posix_rename(source, target)
        except asyncssh.SFTPOpUnsupported:
            try:
                await self.rename_new(source, target)
            except FileExistsError as error:
                words = "the server can't replace a file in one step: it has no posix-rename@openssh.com"
                raise OSError(errno.ENOTSUP, words) from error

    @_told
    async def rename_new(self, source: str, target: str) -> None:
        async with self._explained(target, errno.EEXIST, errno.EEXIST):
            await self._sftp.rename(source, target)

    @_told
    async def remove(self, path: str) -> None:
        async with self._explained(path, folder=errno.EISDIR):
            await self._sftp.remove(path)

    @_told
    async def make_directory(self, path: str) -> None:
        async with self._explained(path, errno.EEXIST, errno.EEXIST):
            await self._sftp.mkdir(path)

    @_told
    async def remove_directory(self, path: str) -> None:
        async with self._explained(path, errno.ENOTDIR, errno.ENOTEMPTY):
            await self._sftp.rmdir(path)

    @_told
    async def sync_directory(self, path: str) -> None:
        try:
            async with self._file(path or "/", "rb") as directory:  # OpenSSH opens it as a file, which its fsync wants
                await directory.fsync()
            self._place.abilities.add("fsync directories")
        except (asyncssh.SFTPError, OSError) as error:
            # a server that can't says no more than "Failure", as one whose disk fails does: the first one is believed
            if "fsync directories" in self._place.abilities or isinstance(error, (*_LOST, ConnectionError)):
                raise

    @_told
    async def free_nbytes(self, path: str) -> int | None:
        try:
            disk = await self._sftp.statvfs(path)
        except asyncssh.SFTPOpUnsupported:
            return None
        return int(disk.bavail) * int(disk.frsize)


def _login_failure(error: Exception, place: ServerPlace) -> OSError:
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
    # the connection may also end while the channel is opened, which has another code
    if isinstance(error, asyncssh.ChannelOpenError) and error.code != asyncssh.OPEN_CONNECT_FAILED:
        return LoginError(f"{place.server} has no SFTP ({words})")
    return ConnectionLostError(words)


def _entry(name: str, attributes: Any) -> Entry:
    kind = {stat.S_IFDIR: "directory", stat.S_IFREG: "file"}.get(stat.S_IFMT(attributes.permissions or 0))
    if kind is None and not stat.S_IFMT(attributes.permissions or 0):  # the server did not say
        types = {asyncssh.FILEXFER_TYPE_DIRECTORY: "directory", asyncssh.FILEXFER_TYPE_REGULAR: "file"}
        kind = types.get(attributes.type)
    return Entry(name, kind or "other", int(attributes.size or 0), float(attributes.mtime or 0))  # type: ignore[arg-type]
