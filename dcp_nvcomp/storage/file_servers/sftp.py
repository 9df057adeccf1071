"""What can be asked of an SFTP server, by asyncssh.

Sizes of requests: OpenSSH's server takes 255 KiB and tells so; one that tells nothing gets 32 KiB. Many are on their
way at once. OpenSSH answers "Failure" for most of what can go wrong, so what it means is looked up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import asyncssh

from dcp_nvcomp.storage.file_servers.session import ConnectionLostError, Entry, RemoteFile, Session

if TYPE_CHECKING:
    from dcp_nvcomp.storage.file_servers.sftp_login import SftpConnection

T = TypeVar("T")

_REQUESTS_ON_THEIR_WAY: Final = 64  # of one operation: 16 MiB with OpenSSH
_READ: Final = asyncssh.FXF_READ
_WRITE: Final = asyncssh.FXF_READ | asyncssh.FXF_WRITE
_CREATE: Final = _WRITE | asyncssh.FXF_CREAT | asyncssh.FXF_EXCL
_LOST: Final = (asyncssh.SFTPNoConnection, asyncssh.SFTPConnectionLost, asyncssh.DisconnectError)
_ERRNO: Final = {
    asyncssh.FX_NO_SUCH_FILE: errno.ENOENT,
    asyncssh.FX_PERMISSION_DENIED: errno.EACCES,
    asyncssh.FX_BAD_MESSAGE: errno.EINVAL,  # what OpenSSH makes of EINVAL and ENAMETOOLONG
    asyncssh.FX_OP_UNSUPPORTED: errno.ENOTSUP,
    asyncssh.FX_INVALID_HANDLE: errno.EBADF,
    asyncssh.FX_NO_SUCH_PATH: errno.ENOENT,
    asyncssh.FX_FILE_ALREADY_EXISTS: errno.EEXIST,
    asyncssh.FX_WRITE_PROTECT: errno.EROFS,
    asyncssh.FX_NO_SPACE_ON_FILESYSTEM: errno.ENOSPC,
    asyncssh.FX_QUOTA_EXCEEDED: errno.EDQUOT,
    asyncssh.FX_DIR_NOT_EMPTY: errno.ENOTEMPTY,
    asyncssh.FX_NOT_A_DIRECTORY: errno.ENOTDIR,
    asyncssh.FX_INVALID_FILENAME: errno.EINVAL,
    asyncssh.FX_LINK_LOOP: errno.ELOOP,
    asyncssh.FX_FILE_IS_A_DIRECTORY: errno.EISDIR,
}


class SftpSession(Session):
    """What one attempt does on a connection."""

    def __init__(self, connection: SftpConnection, silent_seconds: float) -> None:
        self._connection, self._silent_seconds = connection, silent_seconds
        self._sftp = connection.sftp

    def owns(self, file: RemoteFile) -> bool:
        return file.connection is self._connection

    # --- requests -----------------------------------------------------------------------------------------------

    def _begin(self, work: Awaitable[T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._connection.loop)

    def _end(self, future: concurrent.futures.Future[T]) -> T:
        """Return the result, as long as the server says something now and then."""
        began = time.monotonic()
        try:
            while not future.done():
                left = max(began, self._connection.heard_seconds) + self._silent_seconds - time.monotonic()
                if left <= 0:
                    raise self._silent()
                concurrent.futures.wait([future], left)
            result = future.result()
        except BaseException as error:
            future.cancel()
            if isinstance(error, Exception) and not isinstance(error, ConnectionLostError):
                raise self._failure(error) from error
            raise
        self._connection.heard_seconds = time.monotonic()
        return result

    def _silent(self) -> ConnectionLostError:
        self._connection.cut()
        words = f"no answer from {self._connection.server} within {self._silent_seconds:.1f} s"
        return ConnectionLostError(words, errno.ETIMEDOUT)

    def _do(self, work: Awaitable[T]) -> T:
        return self._end(self._begin(work))

    def _failure(self, error: Exception) -> OSError:
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, asyncssh.SFTPError) and not isinstance(error, _LOST):
            if isinstance(error, asyncssh.SFTPFailure):
                words += " (the server does not say why)"
            return OSError(_ERRNO.get(error.code, errno.EIO), words)
        if isinstance(error, UnicodeError):
            return OSError(errno.EINVAL, words)
        self._connection.cut()
        return ConnectionLostError(words)

    def _refused(self, error: OSError, number: int) -> OSError:
        return OSError(number, error.strerror)

    # --- files --------------------------------------------------------------------------------------------------

    def _open(self, path: str, flags: int) -> RemoteFile:
        # block_size=0: one request for each read and write, whose size is ours
        return RemoteFile(self._connection, path, self._do(self._sftp.open(path, flags, encoding=None, block_size=0)))

    def open_to_read(self, path: str) -> RemoteFile:
        return self._open(path, _READ)

    def create(self, path: str) -> RemoteFile:
        try:
            return self._open(path, _CREATE)
        except OSError as error:
            if error.errno == errno.EIO and self.look_up(path) is not None:
                raise self._refused(error, errno.EEXIST) from error
            self._explain_disk(path, error)
            raise

    def open_again(self, path: str) -> RemoteFile:
        return self._open(path, _WRITE)

    def read_into(self, file: RemoteFile, start: int, buffer: memoryview) -> int:
        return self._do(self._read_into(file, start, buffer))

    async def _read_into(self, file: RemoteFile, start: int, buffer: memoryview) -> int:
        step = self._sftp.limits.max_read_len
        ends: list[int] = []

        async def read(position: int) -> None:
            stop = min(position + step, len(buffer))
            while position < stop:
                data = await file.handle.read(stop - position, start + position)
                self._connection.heard_seconds = time.monotonic()
                if not data:
                    ends.append(position)
                    return
                buffer[position : position + len(data)] = data
                position += len(data)

        await _all(read, range(0, len(buffer), step))
        return min(ends, default=len(buffer))

    def begin_write(self, file: RemoteFile, start: int, data: bytes) -> concurrent.futures.Future[None]:
        return self._begin(self._write(file, start, data))

    def end_write(self, begun: concurrent.futures.Future[None]) -> None:
        self._end(begun)

    async def _write(self, file: RemoteFile, start: int, data: bytes) -> None:
        step = self._sftp.limits.max_write_len
        view = memoryview(data)

        async def write(position: int) -> None:
            await file.handle.write(bytes(view[position : position + step]), start + position)
            self._connection.heard_seconds = time.monotonic()

        try:
            await _all(write, range(0, len(data), step))
        except asyncssh.SFTPFailure as error:
            reason = await self._reason(file.path, len(data))
            if reason is None:
                raise
            raise reason from error

    async def _reason(self, path: str, nbytes: int = 1) -> asyncssh.SFTPError | None:
        """Return why so many bytes can't be written there, if the state of the disk says so."""
        try:
            found = await self._sftp.statvfs(path)
        except asyncssh.SFTPError:
            return None
        if found.flags & asyncssh.FXE_STATVFS_ST_RDONLY:
            return asyncssh.SFTPWriteProtect("the server's disk is mounted read-only")
        if found.bavail * found.frsize < nbytes or (found.files and not found.favail):
            return asyncssh.SFTPNoSpaceOnFilesystem("the server's disk is full")
        return None

    def _explain_disk(self, path: str, error: OSError) -> None:
        reason = self._do(self._reason(path.rpartition("/")[0] or "/")) if error.errno == errno.EIO else None
        if reason is not None:
            raise self._failure(reason) from error

    def sync(self, file: RemoteFile) -> None:
        try:
            self._do(file.handle.fsync())
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise

    def nbytes(self, file: RemoteFile) -> int:
        return int(self._do(file.handle.stat()).size or 0)

    def close(self, file: RemoteFile) -> None:
        self._do(file.handle.close())

    # --- names --------------------------------------------------------------------------------------------------

    def look_up(self, path: str) -> Entry | None:
        try:
            return _entry(path.rpartition("/")[2], self._do(self._sftp.lstat(path)))
        except FileNotFoundError:
            return None

    def file_nbytes(self, path: str) -> int | None:
        try:
            entry = _entry("", self._do(self._sftp.stat(path)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return entry.nbytes if entry.kind == "file" else None

    def list(self, path: str) -> list[Entry]:
        try:
            found = self._do(self._sftp.readdir(path))
        except OSError as error:
            self._explain_not_a_directory(path, error)
            raise
        return [_entry(str(item.filename), item.attrs) for item in found if item.filename not in (".", "..")]

    def _explain_not_a_directory(self, path: str, error: OSError) -> None:
        if error.errno == errno.EIO:
            entry = self.look_up(path)
            if entry is not None and entry.kind != "directory":
                raise self._refused(error, errno.ENOTDIR) from error

    def replace(self, source: str, target: str) -> None:
        try:
            self._do(self._sftp.posix_rename(source, target))
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                self._replace_without_extension(source, target)
                return
            entry = self.look_up(target) if error.errno == errno.EIO else None
            if entry is not None and entry.kind == "directory":
                raise self._refused(error, errno.EISDIR) from error
            raise

    def _replace_without_extension(self, source: str, target: str) -> None:
        try:
            self.rename_new(source, target)
        except FileExistsError as error:
            words = "the server can't replace a file in one step: it has no posix-rename@openssh.com"
            raise OSError(errno.ENOTSUP, words) from error

    def rename_new(self, source: str, target: str) -> None:
        try:
            self._do(self._sftp.rename(source, target))
        except OSError as error:
            if error.errno == errno.EIO and self.look_up(target) is not None:
                raise self._refused(error, errno.EEXIST) from error
            raise

    def remove(self, path: str) -> None:
        try:
            self._do(self._sftp.remove(path))
        except OSError as error:
            entry = self.look_up(path) if error.errno == errno.EIO else None
            if entry is not None and entry.kind == "directory":
                raise self._refused(error, errno.EISDIR) from error
            raise

    def make_directory(self, path: str) -> None:
        try:
            self._do(self._sftp.mkdir(path))
        except OSError as error:
            if error.errno == errno.EIO and self.look_up(path) is not None:
                raise self._refused(error, errno.EEXIST) from error
            self._explain_disk(path, error)
            raise

    def remove_directory(self, path: str) -> None:
        try:
            self._do(self._sftp.rmdir(path))
        except OSError as error:
            self._explain_not_a_directory(path, error)
            if error.errno == errno.EIO and self.look_up(path) is not None:
                raise self._refused(error, errno.ENOTEMPTY) from error
            raise

    def sync_directory(self, path: str) -> None:
        try:
            directory = self._open(path or "/", _READ)  # OpenSSH opens it as a file, which its fsync wants
        except ConnectionLostError:
            raise
        except OSError:  # elsewhere that is not possible
            return
        try:
            self.sync(directory)
            self._connection.syncs_directories = True
        except ConnectionLostError:
            raise
        except OSError:
            if self._connection.syncs_directories:
                raise
            # a server that can't says no more than "Failure", as one whose disk fails does: the first one is believed
        finally:
            if self._connection.is_alive:
                self.close(directory)

    def free_nbytes(self, path: str) -> int | None:
        try:
            found = self._do(self._sftp.statvfs(path))
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                return None
            raise
        return int(found.bavail) * int(found.frsize)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _all(work: Callable[[int], Awaitable[None]], positions: range) -> None:
    """Await all of it, so many at once; if one fails, no more are begun."""
    waiting: Iterator[int] = iter(positions)

    async def next_ones() -> None:
        for position in waiting:
            await work(position)

    tasks = [asyncio.ensure_future(next_ones()) for _ in range(min(_REQUESTS_ON_THEIR_WAY, len(positions)))]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _entry(name: str, attributes: Any) -> Entry:
    mode = attributes.permissions or 0
    kind = {stat.S_IFDIR: "directory", stat.S_IFREG: "file"}.get(stat.S_IFMT(mode), "other")
    if not stat.S_IFMT(mode):  # the server did not tell
        kind = {asyncssh.FILEXFER_TYPE_DIRECTORY: "directory", asyncssh.FILEXFER_TYPE_REGULAR: "file"}.get(
            attributes.type, "other"
        )
    return Entry(name, kind, int(attributes.size or 0), float(attributes.mtime or 0))  # type: ignore[arg-type]
