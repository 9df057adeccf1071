"""SMB, by smbprotocol's `smbclient`: each connection has a thread, in which its calls wait for the server.

`smbclient` keeps its connections in one cache for the whole process, unless it is given another: here each has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ntpath
import socket
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import smbclient
from smbprotocol.connection import Connection as Wire
from smbprotocol.exceptions import EndOfFile, SMBAuthenticationError, SMBException, SMBOSError
from smbprotocol.file_info import FileAttributes, FileRenameInformation
from smbprotocol.header import Commands, NtStatus
from smbprotocol.open import DirectoryAccessMask, FilePipePrinterAccessMask, SMB2SetInfoRequest
from smbprotocol.tree import TreeConnect

from dcp_nvcomp.storage.file_servers.client import Connection, ConnectionLostError, Entry, HeldOpenError, LoginError
from dcp_nvcomp.storage.file_servers.urls import ServerPlace

T = TypeVar("T")
P = ParamSpec("P")

# What SMBOSError does not know.
_ERRNO: Final = {
    NtStatus.STATUS_ACCESS_DENIED: errno.EACCES,
    NtStatus.STATUS_CANNOT_DELETE: errno.EACCES,
    NtStatus.STATUS_DELETE_PENDING: errno.ENOENT,  # removed, but another client still has it open
    NtStatus.STATUS_DISK_FULL: errno.ENOSPC,
    NtStatus.STATUS_INVALID_PARAMETER: errno.EINVAL,
    NtStatus.STATUS_NO_SUCH_FILE: errno.ENOENT,
    NtStatus.STATUS_NOT_SUPPORTED: errno.ENOTSUP,
    NtStatus.STATUS_OBJECT_NAME_INVALID: errno.EINVAL,
    0xC0000044: errno.EDQUOT,  # STATUS_QUOTA_EXCEEDED
    0xC00000A2: errno.EROFS,  # STATUS_MEDIA_WRITE_PROTECTED
}
# The login, or the handle, is gone: a new one will do.
_LOST: Final = (
    *(NtStatus.STATUS_NETWORK_NAME_DELETED, NtStatus.STATUS_USER_SESSION_DELETED, NtStatus.STATUS_FILE_CLOSED),
    *(NtStatus.STATUS_IO_TIMEOUT, NtStatus.STATUS_INSUFFICIENT_RESOURCES, NtStatus.STATUS_INSUFF_SERVER_RESOURCES),
    *(NtStatus.STATUS_SERVER_UNAVAILABLE, NtStatus.STATUS_REQUEST_NOT_ACCEPTED),
    0xC000020C,  # STATUS_CONNECTION_DISCONNECTED
    0xC000035C,  # STATUS_NETWORK_SESSION_EXPIRED
)
_HELD_OPEN: Final = (NtStatus.STATUS_ACCESS_DENIED, NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)


def _status(error: Exception) -> int:
    """Return the server's NTSTATUS; 0 if it is not the server's error."""
    return int(getattr(error, "ntstatus", 0) or getattr(error, "status", 0))


def _errno(status: int) -> int:
    return _ERRNO.get(status) or SMBOSError(status, "").errno or errno.EIO


def _in_thread(
    method: Callable[Concatenate[SmbConnection, P], T],
) -> Callable[Concatenate[SmbConnection, P], Coroutine[Any, Any, T]]:
    """Run a method in its connection's thread, and let it raise OSErrors instead of smbprotocol's errors."""

    @functools.wraps(method)
    async def call(self: SmbConnection, *arguments: P.args, **options: P.kwargs) -> T:
        work = functools.partial(method, self, *arguments, **options)
        try:
            try:
                done = asyncio.get_running_loop().run_in_executor(self._thread, work)
            except RuntimeError as error:
                if self._is_cut:
                    raise ConnectionLostError("the connection was given up") from error
                return work()  # at the end of the program no thread takes work any more, and a save may go on
            return await done
        except (LoginError, HeldOpenError, FileExistsError):
            raise
        except Exception as error:
            raise self._failure(error) from error

    return call  # type: ignore[return-value]


class _Wire(Wire):  # type: ignore[misc]
    def send(self, message: Any, sid: int | None = None, *arguments: Any, **options: Any) -> Any:
        # SMB 3.1.1 wants this one signed also where nothing else is
        if message.COMMAND == Commands.SMB2_TREE_CONNECT and getattr(self.session_table.get(sid), "signing_key", None):
            options["force_signature"] = True
        return super().send(message, sid, *arguments, **options)


class _OneWire(dict[str, Any]):
    """What `smbclient` looks its connection up in; it would replace one that is lost by one that nothing here knows."""

    def get(self, key: str, default: Any = None) -> Any:
        wire = super().get(key, default)
        if wire is not None and (wire.transport is None or not wire.transport.connected):
            raise ConnectionLostError("the connection was lost")
        return wire


class SmbConnection(Connection):
    """A connection with one login."""

    def __init__(self, place: ServerPlace) -> None:
        self._place = place
        self._is_cut = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="smb")
        self._login = {**place.client, "port": place.port}
        signing = self._login.pop("require_signing")
        self._auth_protocol = self._login.pop("auth_protocol")  # at a call, smbprotocol 1.13 does not take it
        self._wire = _Wire(uuid.uuid4(), place.host, place.port, require_signing=signing)
        self._login["connection_cache"] = _OneWire({f"{place.host.lower()}:{place.port}": self._wire})

    @property
    def is_alive(self) -> bool:
        return self._wire.transport is not None and self._wire.transport.connected

    async def log_in(self, seconds: float) -> None:
        await self._connect(seconds)

    @_in_thread
    def _connect(self, seconds: float) -> None:
        self._login["connection_timeout"] = max(1, int(seconds))
        try:
            self._wire.connect(timeout=self._login["connection_timeout"])
            if self._is_cut:  # before there was anything to cut
                self._wire.transport.close()
                raise ConnectionLostError("the connection was given up")
            session = smbclient.register_session(self._place.host, auth_protocol=self._auth_protocol, **self._login)
            TreeConnect(session, rf"\\{self._place.host}\{self._place.share}").connect()
        except Exception as error:
            raise _login_failure(error, self._place) from error

    def cut(self) -> None:
        self._is_cut = True
        self._thread.shutdown(wait=False)
        transport = self._wire.transport
        if transport is not None and transport.connected:
            with contextlib.suppress(OSError):  # its close() would wait for a call that is sending
                transport._sock.shutdown(socket.SHUT_RDWR)

    def _failure(self, error: Exception) -> OSError:
        words, status = f"{type(error).__name__}: {error}", _status(error)
        if status in _LOST:
            return ConnectionLostError(words)
        if status == NtStatus.STATUS_SHARING_VIOLATION:
            return HeldOpenError(f"another client has it open ({words})")
        if status:
            return OSError(_errno(status), words)
        if isinstance(error, UnicodeError):
            return OSError(errno.EINVAL, words)
        return ConnectionLostError(words)

    def _path(self, path: str) -> str:
        return "\\".join([rf"\\{self._place.host}", self._place.share, *filter(None, path.split("/"))])

    def _open(self, path: str, mode: str, **options: Any) -> Any:
        options = {"share_access": self._place.share_access, **options, **self._login}
        return smbclient.open_file(self._path(path), mode, buffering=0, **options)

    @_in_thread
    def look_up(self, path: str) -> Entry | None:
        return self._look_up(path, follow_symlinks=False)

    def _look_up(self, path: str, *, follow_symlinks: bool) -> Entry | None:
        look = functools.partial(smbclient.stat, self._path(path), follow_symlinks=follow_symlinks, **self._login)
        try:
            found = _looked_for_again(look)
        except SMBException as error:
            if _errno(_status(error)) in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise
        return _entry(ntpath.basename(path), found.st_file_attributes, found.st_size, found.st_mtime)

    @_in_thread
    def file_nbytes(self, path: str) -> int | None:
        entry = self._look_up(path, follow_symlinks=True)
        return entry.nbytes if entry is not None and entry.kind == "file" else None

    @_in_thread
    def list(self, path: str) -> list[Entry]:
        found = [item.smb_info for item in smbclient.scandir(self._path(path), **self._login)]
        return [
            _entry(item.file_name, item.file_attributes, item.end_of_file, item.last_write_time.timestamp())
            for item in found
        ]

    @_in_thread
    def read(self, path: str, start: int, stop: int) -> tuple[bytes, int]:
        with _looked_for_again(lambda: self._open(path, "rb")) as file:
            nbytes = file.fd.end_of_file
            found = memoryview(bytearray(max(0, min(stop, nbytes) - start)))
            got = 0
            file.seek(start)
            with contextlib.suppress(EndOfFile):
                while got < len(found) and (more := file.readinto(found[got:])):
                    got += more
        return bytes(found[:got]), nbytes

    @_in_thread
    def write(self, path: str, start: int, data: bytes, *, create: bool = False, sync: bool = False) -> int:
        try:
            file = self._open(path, "xb" if create else "r+b")
        except SMBException as error:
            if create and _status(error) == NtStatus.STATUS_FILE_IS_A_DIRECTORY:
                raise FileExistsError(errno.EEXIST, str(error)) from error
            raise
        with file:
            left = memoryview(data)
            file.seek(start)
            while left:
                left = left[file.write(left) :]
            if sync:
                file.fd.flush()
            file.fd.close(get_attributes=True)
            return int(file.fd.end_of_file)

    @_in_thread
    def replace(self, source: str, target: str) -> None:
        try:
            self._rename(source, target, replace=True)
        except SMBException as error:
            if _status(error) in _HELD_OPEN and self._is_held_open(target):
                raise HeldOpenError(f"another client has it open ({error})") from error
            raise

    def _rename(self, source: str, target: str, *, replace: bool) -> None:
        # smbclient.replace would first open the target to be executed, which Samba refuses for most files
        change = FileRenameInformation()
        change["replace_if_exists"] = replace
        change["file_name"] = target.replace("/", "\\")
        with self._open(source, "rb", desired_access=FilePipePrinterAccessMask.DELETE, share_access="rwd") as file:
            request = SMB2SetInfoRequest()
            request["info_type"], request["file_info_class"] = change.INFO_TYPE, change.INFO_CLASS
            request["file_id"], request["buffer"] = file.fd.file_id, change
            tree = file.fd.tree_connect
            self._wire.receive(self._wire.send(request, tree.session.session_id, tree.tree_connect_id))

    def _is_held_open(self, path: str) -> bool:
        """Return whether a client has a file open: then it can't be opened exclusively."""
        try:
            self._open(path, "rb", share_access=None).close()
        except SMBException as error:
            return _status(error) in (NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)
        return False

    @_in_thread
    def rename_new(self, source: str, target: str) -> None:
        # Samba first looks for the name and then renames: of two clients at once, both may succeed. A hard link is
        # made in one step.
        try:
            smbclient.link(self._path(source), self._path(target), **self._login)
        except SMBException as error:
            status = _status(error)
            if not status or status in _LOST or _errno(status) in (errno.EEXIST, errno.ENOENT):
                raise
            self._rename(source, target, replace=False)  # the server's file system has no hard links (FAT)
            return
        try:
            smbclient.remove(self._path(source), **self._login)
        except SMBException as error:
            status = _status(error)
            if not status or status in _LOST:
                raise  # then it is known whether the link was made once another attempt has looked

    @_in_thread
    def remove(self, path: str) -> None:
        smbclient.remove(self._path(path), **self._login)

    @_in_thread
    def make_directory(self, path: str) -> None:
        smbclient.mkdir(self._path(path), **self._login)

    @_in_thread
    def remove_directory(self, path: str) -> None:
        smbclient.rmdir(self._path(path), **self._login)

    @_in_thread
    def sync_directory(self, path: str) -> None:
        access = DirectoryAccessMask.FILE_ADD_FILE | DirectoryAccessMask.FILE_ADD_SUBDIRECTORY
        try:
            with self._open(path, "rb", file_type="dir", desired_access=access, share_access="rwd") as folder:
                folder.fd.flush()
        except SMBException as error:  # Windows does not sync directories, and need not
            failed = self._failure(error)
            if (
                not isinstance(failed, OSError)
                or isinstance(failed, ConnectionLostError)
                or failed.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT)
            ):
                raise

    @_in_thread
    def free_nbytes(self, path: str) -> int | None:
        return int(smbclient.stat_volume(self._path(path), **self._login).caller_available_size)


def _looked_for_again(look: Callable[[], T]) -> T:
    """Look once more for what is not found: Samba now and then does not find a name that is being replaced."""
    try:
        return look()
    except SMBException as error:
        if _errno(_status(error)) != errno.ENOENT:
            raise
    return look()


def _login_failure(error: Exception, place: ServerPlace) -> OSError:
    """Return our error for a login that failed: one to be tried again, or not."""
    words = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    if _status(error) == NtStatus.STATUS_BAD_NETWORK_NAME:
        return LoginError(f"{place.server} has no share {place.share!r} ({words})", errno.ENODEV)
    if isinstance(error, SMBAuthenticationError) or (_status(error) and _status(error) not in _LOST):
        return LoginError(
            f"{place.server} does not let {place.user} in ({words}). Check username=, password= and domain="
        )
    if isinstance(error, ImportError):
        return LoginError(
            f"this client can't log in as auth_protocol={place.client['auth_protocol']!r} asks for ({words}: "
            "pip install 'smbprotocol[kerberos]')",
            errno.EINVAL,
        )
    if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
        return LoginError(f"{place.server} is not known to the network ({cause.strerror})", errno.EHOSTUNREACH)
    if isinstance(error, SMBException) and any(word in str(error).lower() for word in ("signing", "encrypt")):
        return LoginError(f"{place.server} and this client do not agree on signing or encryption ({words})")
    return ConnectionLostError(words)


def _entry(name: str, attributes: int, nbytes: int, modified_seconds: float) -> Entry:
    kind: Literal["file", "directory", "other"] = "file"
    if attributes & FileAttributes.FILE_ATTRIBUTE_REPARSE_POINT:
        kind = "other"
    elif attributes & FileAttributes.FILE_ATTRIBUTE_DIRECTORY:
        kind = "directory"
    return Entry(name, kind, nbytes, modified_seconds)
