"""SMB by smbprotocol: each connection has one user at a time, a login and a tree of its own.

smbprotocol's own pool of connections is one for the whole process and does not know when they are broken; so it is not
used. Requests of 1 MiB are on their way as many as the server's credits allow.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from smbprotocol import connection as smb_connection
from smbprotocol.exceptions import SMBAuthenticationError, SMBException, SMBResponseException
from smbprotocol.file_info import (
    FileAttributes,
    FileDispositionInformation,
    FileFsFullSizeInformation,
    FileInformationClass,
    FileRenameInformation,
    FileStandardInformation,
)
from smbprotocol.header import NtStatus
from smbprotocol.open import (
    CreateDisposition,
    CreateOptions,
    DirectoryAccessMask,
    FilePipePrinterAccessMask,
    ImpersonationLevel,
    Open,
    ShareAccess,
    SMB2QueryInfoRequest,
    SMB2QueryInfoResponse,
    SMB2SetInfoRequest,
)
from smbprotocol.session import Session as SmbLogin
from smbprotocol.tree import TreeConnect

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.storage.file_servers.session import (
    Connection,
    ConnectionLostError,
    Entry,
    HeldOpenError,
    LoginError,
    RemoteFile,
    Session,
)

if TYPE_CHECKING:
    from dcp_nvcomp.storage.file_servers.urls import SmbPlace

__all__ = ["SmbConnection", "connect"]

_REQUEST_NBYTES: Final = 1 << 20
_REQUESTS_ON_THEIR_WAY: Final = 16
_CREDITS: Final = 512  # how many we want to have, for so many requests and as many again
_CREDIT_NBYTES: Final = 1 << 16
_LISTED_NBYTES: Final = 1 << 16
_ACCESS: Final = FilePipePrinterAccessMask
_SHARING: Final = {
    "r": ShareAccess.FILE_SHARE_READ,
    "w": ShareAccess.FILE_SHARE_WRITE,
    "d": ShareAccess.FILE_SHARE_DELETE,
}
_PLAIN: Final = CreateOptions.FILE_NON_DIRECTORY_FILE
_FOLDER: Final = CreateOptions.FILE_DIRECTORY_FILE
_LINKS_AS_THEY_ARE: Final = CreateOptions.FILE_OPEN_REPARSE_POINT
_ERRNO: Final = {
    NtStatus.STATUS_ACCESS_DENIED: errno.EACCES,
    NtStatus.STATUS_CANNOT_DELETE: errno.EACCES,
    NtStatus.STATUS_DELETE_PENDING: errno.EBUSY,
    NtStatus.STATUS_DIRECTORY_NOT_EMPTY: errno.ENOTEMPTY,
    NtStatus.STATUS_DISK_FULL: errno.ENOSPC,
    NtStatus.STATUS_FILE_IS_A_DIRECTORY: errno.EISDIR,
    NtStatus.STATUS_INVALID_DEVICE_REQUEST: errno.ENOTSUP,
    NtStatus.STATUS_INVALID_INFO_CLASS: errno.ENOTSUP,
    NtStatus.STATUS_INVALID_PARAMETER: errno.EINVAL,
    NtStatus.STATUS_NO_SUCH_FILE: errno.ENOENT,
    NtStatus.STATUS_NOT_A_DIRECTORY: errno.ENOTDIR,
    NtStatus.STATUS_NOT_FOUND: errno.ENOENT,
    NtStatus.STATUS_NOT_SUPPORTED: errno.ENOTSUP,
    NtStatus.STATUS_OBJECT_NAME_COLLISION: errno.EEXIST,
    NtStatus.STATUS_OBJECT_NAME_INVALID: errno.EINVAL,
    NtStatus.STATUS_OBJECT_NAME_NOT_FOUND: errno.ENOENT,
    NtStatus.STATUS_OBJECT_PATH_INVALID: errno.EINVAL,
    NtStatus.STATUS_OBJECT_PATH_NOT_FOUND: errno.ENOENT,
    NtStatus.STATUS_OBJECT_PATH_SYNTAX_BAD: errno.EINVAL,
    NtStatus.STATUS_PRIVILEGE_NOT_HELD: errno.EPERM,
    NtStatus.STATUS_SHARING_VIOLATION: errno.EBUSY,
    0xC0000044: errno.EDQUOT,  # STATUS_QUOTA_EXCEEDED
    0xC00000A2: errno.EROFS,  # STATUS_MEDIA_WRITE_PROTECTED
}
# The login, or the handle, is gone: a new one will do.
_LOST: Final = (
    NtStatus.STATUS_NETWORK_NAME_DELETED,
    NtStatus.STATUS_USER_SESSION_DELETED,
    NtStatus.STATUS_FILE_CLOSED,
    NtStatus.STATUS_IO_TIMEOUT,
    NtStatus.STATUS_INSUFFICIENT_RESOURCES,
    NtStatus.STATUS_INSUFF_SERVER_RESOURCES,
    NtStatus.STATUS_SERVER_UNAVAILABLE,
    NtStatus.STATUS_REQUEST_NOT_ACCEPTED,
    0xC000020C,  # STATUS_CONNECTION_DISCONNECTED
    0xC000035C,  # STATUS_NETWORK_SESSION_EXPIRED
)
_HELD_OPEN: Final = (NtStatus.STATUS_ACCESS_DENIED, NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)


class _Wire(smb_connection.Connection):  # type: ignore[misc]
    """smbprotocol's connection, which would wait forever for an answer.

    Attributes:
        silent_seconds: how long the server may be silent.
    """

    silent_seconds = 1.0

    def receive(self, request: Any, wait: bool = True, timeout: float | None = None, **options: Any) -> Any:
        seconds = self.silent_seconds if timeout is None else timeout
        if not request.response_event.wait(seconds):
            raise ConnectionLostError(
                f"no answer from {self.server_name}:{self.port} within {seconds:.1f} s", errno.ETIMEDOUT
            )
        return super().receive(request, wait=wait, timeout=max(seconds, 1.0), **options)

    def limit(self, silent_seconds: float) -> None:
        """Set how long the server may be silent, also while it takes nothing more from us."""
        self.silent_seconds = silent_seconds
        seconds = max(silent_seconds, 0.001)
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        # smbprotocol has no way to say so: its socket blocks
        self.transport._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def connect(place: SmbPlace, silent_seconds: float) -> SmbConnection:
    """Log in, and connect to the share.

    Args:
        place: where.
        silent_seconds: how long the server may take.

    Raises:
        LoginError: the server does not let us in, or has no such share.
        ConnectionLostError: it does not answer.
    """
    wire = _Wire(uuid.uuid4(), place.host, place.port, require_signing=place.require_signing)
    wire.silent_seconds = silent_seconds
    try:
        wire.connect(timeout=max(1, int(silent_seconds)))
        wire.transport._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        login = SmbLogin(
            wire,
            username=place.username,
            password=place.password,
            require_encryption=place.encrypt,
            auth_protocol=place.auth_protocol,
        )
        login.connect()
        tree = TreeConnect(login, rf"\\{place.host}\{place.share}")
        tree.connect()
    except BaseException as error:
        _cut(wire)
        if not isinstance(error, Exception):
            raise
        raise _login_failure(error, place) from error
    return SmbConnection(wire, tree, place)


def _login_failure(error: Exception, place: SmbPlace) -> OSError:
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionLostError):
        return error
    status = error.status if isinstance(error, SMBResponseException) else None
    if status in _LOST:
        return ConnectionLostError(words)
    if status == NtStatus.STATUS_BAD_NETWORK_NAME:
        return LoginError(f"{place.server} has no share {place.share!r} ({words})", errno.ENODEV)
    if status is not None or isinstance(error, SMBAuthenticationError):
        return LoginError(
            f"{place.server} does not let {place.username or 'this user'} in ({words}). Check username=, password= "
            "and domain="
        )
    cause = error.__cause__
    if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
        return LoginError(f"{place.server} is not known to the network ({cause.strerror})", errno.EHOSTUNREACH)
    if isinstance(error, SMBException) and any(word in str(error).lower() for word in ("signing", "encrypt")):
        return LoginError(f"{place.server} and this client do not agree on signing or encryption ({words})")
    return ConnectionLostError(words, getattr(cause, "errno", None) or errno.ECONNREFUSED)


def _cut(wire: _Wire) -> None:
    transport = wire.transport
    if transport is not None and transport.connected:
        with contextlib.suppress(OSError):  # close() would wait for who is sending
            transport._sock.shutdown(socket.SHUT_RDWR)


class SmbConnection(Connection):
    """A connection for one user at a time.

    Args:
        wire: the connection.
        tree: the share.
        place: where it leads.

    Attributes:
        sharing: what others may do to a file that is open here.
    """

    users = 1

    def __init__(self, wire: _Wire, tree: Any, place: SmbPlace) -> None:
        self.wire, self.tree, self.server = wire, tree, place.server
        self.sharing = sum(_SHARING[letter] for letter in set(place.share_access))
        # on a share of a distributed file system names begin with the server's and the share's
        self.prefix = [place.host, place.share] if tree.is_dfs_share else []
        self._is_cut = False

    @property
    def is_alive(self) -> bool:
        return not self._is_cut and bool(self.wire.transport.connected)

    def session(self, silent_seconds: float) -> SmbSession:
        self.wire.limit(silent_seconds)
        return SmbSession(self)

    def cut(self) -> None:
        self._is_cut = True
        _cut(self.wire)


@dataclass
class _Write:
    """A write that was begun.

    Attributes:
        waiting: its requests that were not answered yet, with how to read the answer.
    """

    waiting: deque[tuple[Any, Any]]


class SmbSession(Session):
    """What one attempt does on a connection.

    Args:
        connection: the connection.
    """

    def __init__(self, connection: SmbConnection) -> None:
        self._connection, self._wire, self._tree = connection, connection.wire, connection.tree

    def owns(self, file: RemoteFile) -> bool:
        return file.connection is self._connection

    # --- requests -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except SMBResponseException as error:
            words = f"{type(error).__name__}: {error}"
            if error.status in _LOST:
                self._connection.cut()
                raise ConnectionLostError(words) from error
            failure = OSError(_ERRNO.get(error.status, errno.EIO), words)
            failure.ntstatus = error.status  # type: ignore[attr-defined]
            raise failure from error
        except ConnectionLostError:
            self._connection.cut()
            raise
        except BlockingIOError as error:
            self._connection.cut()
            words = f"{self._connection.server} took nothing for {self._wire.silent_seconds:.1f} s"
            raise ConnectionLostError(words, errno.ETIMEDOUT) from error
        except UnicodeError as error:
            raise OSError(errno.EINVAL, f"{type(error).__name__}: {error}") from error
        except (CheckpointError, MemoryError, AssertionError):
            raise
        except Exception as error:
            if hasattr(error, "ntstatus"):  # the server's answer, as it is told above
                raise
            self._connection.cut()
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error

    def _send(self, message: Any, nbytes: int = 0) -> Any:
        """Send a request, and ask for more credits than it takes as long as we have few."""
        charge = max(1, -(-nbytes // _CREDIT_NBYTES))
        window = self._wire.sequence_window
        wanted = charge + (64 if window["high"] - window["low"] < _CREDITS else 0)
        login = self._tree.session
        return self._wire.send(message, login.session_id, self._tree.tree_connect_id, credit_request=wanted)

    def _has_credits(self, nbytes: int) -> bool:
        window = self._wire.sequence_window
        return bool(window["high"] - window["low"] > -(-nbytes // _CREDIT_NBYTES))

    def _call(self, message: Any) -> Any:
        return self._wire.receive(self._send(message))

    def _name(self, path: str) -> str:
        return "\\".join([*self._connection.prefix, *filter(None, path.split("/"))])

    def _open(self, path: str, access: int, disposition: int, options: int, *, sharing: int | None = None) -> Open:
        opened = Open(self._tree, self._name(path))
        opened.create(
            ImpersonationLevel.Impersonation,
            access,
            FileAttributes.FILE_ATTRIBUTE_NORMAL,
            self._connection.sharing if sharing is None else sharing,
            disposition,
            options,
        )
        return opened

    @contextlib.contextmanager
    def _opened(self, path: str, access: int, options: int = 0, **how: Any) -> Iterator[Open]:
        """Have something open for a while. What fails in it must not be hidden by what then fails in closing."""
        with self._errors():
            opened = self._open(path, access, CreateDisposition.FILE_OPEN, options, **how)
            try:
                yield opened
            except BaseException:
                if self._connection.is_alive:
                    with contextlib.suppress(SMBException, OSError):
                        opened.close()
                raise
            opened.close()

    # --- files --------------------------------------------------------------------------------------------------

    def _file(self, path: str, access: int, disposition: int) -> RemoteFile:
        with self._errors():
            return RemoteFile(self._connection, path, self._open(path, access, disposition, _PLAIN))

    def open_to_read(self, path: str) -> RemoteFile:
        return self._file(path, _ACCESS.FILE_READ_DATA | _ACCESS.FILE_READ_ATTRIBUTES, CreateDisposition.FILE_OPEN)

    def create(self, path: str) -> RemoteFile:
        access = _ACCESS.FILE_READ_DATA | _ACCESS.FILE_WRITE_DATA | _ACCESS.FILE_READ_ATTRIBUTES
        return self._file(path, access, CreateDisposition.FILE_CREATE)

    def open_again(self, path: str) -> RemoteFile:
        access = _ACCESS.FILE_READ_DATA | _ACCESS.FILE_WRITE_DATA | _ACCESS.FILE_READ_ATTRIBUTES
        return self._file(path, access, CreateDisposition.FILE_OPEN)

    def read_into(self, file: RemoteFile, start: int, buffer: memoryview) -> int:
        with self._errors():
            step = min(_REQUEST_NBYTES, self._wire.max_read_size)
            waiting: deque[tuple[int, int, Any, Any]] = deque()
            position, end = 0, len(buffer)
            while waiting or position < end:
                length = min(step, end - position)
                if length > 0 and self._may_send(len(waiting), length):
                    message, unpack = file.handle.read(start + position, length, send=False)
                    waiting.append((position, length, self._send(message, length), unpack))
                    position += length
                    continue
                begin, length, request, unpack = waiting.popleft()
                data = self._answer(request, unpack)
                buffer[begin : begin + len(data)] = data
                if len(data) < length and begin + len(data) < end:
                    end, position = begin + len(data), max(position, begin + len(data))
                    if data:  # the server gave less than there is, or the file ends here: ask again to know
                        for _, _, request, unpack in waiting:
                            self._answer(request, unpack)
                        rest = self.read_into(file, start + end, buffer[end:])
                        return end + rest
            return end

    def _answer(self, request: Any, unpack: Any) -> bytes:
        try:
            return bytes(unpack(request))
        except SMBResponseException as error:
            if error.status != NtStatus.STATUS_END_OF_FILE:
                raise
            return b""

    def _may_send(self, waiting: int, nbytes: int) -> bool:
        return waiting < _REQUESTS_ON_THEIR_WAY and (not waiting or self._has_credits(nbytes))

    def begin_write(self, file: RemoteFile, start: int, data: bytes) -> _Write:
        begun = _Write(deque())
        with self._errors():
            step = min(_REQUEST_NBYTES, self._wire.max_write_size)
            view = memoryview(data)
            for position in range(0, len(data), step):
                piece = bytes(view[position : position + step])
                while begun.waiting and not self._may_send(len(begun.waiting), len(piece)):
                    self._confirm(begun)
                message, unpack = file.handle.write(piece, start + position, send=False)
                begun.waiting.append((self._send(message, len(piece)), unpack))
        return begun

    def end_write(self, begun: _Write) -> None:
        with self._errors():
            while begun.waiting:
                self._confirm(begun)

    def _confirm(self, begun: _Write) -> None:
        request, unpack = begun.waiting.popleft()
        unpack(request)

    def sync(self, file: RemoteFile) -> None:
        with self._errors():
            file.handle.flush()

    def nbytes(self, file: RemoteFile) -> int:
        with self._errors():
            return int(self._query(file.handle, FileStandardInformation)["end_of_file"].get_value())

    def close(self, file: RemoteFile) -> None:
        with self._errors():
            file.handle.close()

    # --- names --------------------------------------------------------------------------------------------------

    def look_up(self, path: str) -> Entry | None:
        try:
            with self._opened(path, _ACCESS.FILE_READ_ATTRIBUTES, _LINKS_AS_THEY_ARE) as found:
                entry = _entry(path.rpartition("/")[2], found.file_attributes, found.end_of_file, found.last_write_time)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return entry

    def list(self, path: str) -> list[Entry]:
        entries: list[Entry] = []
        access = DirectoryAccessMask.FILE_LIST_DIRECTORY | DirectoryAccessMask.FILE_READ_ATTRIBUTES
        with self._opened(path, access, _FOLDER) as folder:
            while True:
                try:
                    page = folder.query_directory(
                        "*", FileInformationClass.FILE_DIRECTORY_INFORMATION, max_output=_LISTED_NBYTES
                    )
                except SMBResponseException as error:
                    if error.status not in (NtStatus.STATUS_NO_MORE_FILES, NtStatus.STATUS_NO_SUCH_FILE):
                        raise
                    break
                for item in page:
                    name = item["file_name"].get_value().decode("utf-16-le")
                    if name not in (".", ".."):
                        values = (
                            item[field].get_value() for field in ("file_attributes", "end_of_file", "last_write_time")
                        )
                        entries.append(_entry(name, *values))
        return entries

    def _rename(self, source: str, target: str, *, replace: bool) -> None:
        information = FileRenameInformation()
        information["replace_if_exists"] = replace
        information["file_name"] = self._name(target)
        with self._opened(source, _ACCESS.DELETE | _ACCESS.FILE_READ_ATTRIBUTES, _PLAIN) as file:
            self._set(file, information)

    def _query(self, opened: Open, information: Any) -> Any:
        request = SMB2QueryInfoRequest()
        request["info_type"] = information.INFO_TYPE
        request["file_info_class"] = information.INFO_CLASS
        request["output_buffer_length"] = _LISTED_NBYTES
        request["file_id"] = opened.file_id
        answer = SMB2QueryInfoResponse()
        answer.unpack(self._call(request)["data"].get_value())
        return answer.parse_buffer(information)

    def _set(self, opened: Open, information: Any) -> None:
        request = SMB2SetInfoRequest()
        request["info_type"] = information.INFO_TYPE
        request["file_info_class"] = information.INFO_CLASS
        request["file_id"] = opened.file_id
        request["buffer"] = information
        self._call(request)

    def replace(self, source: str, target: str) -> None:
        try:
            self._rename(source, target, replace=True)
        except OSError as error:
            if getattr(error, "ntstatus", 0) in _HELD_OPEN and self._is_held_open(target):
                raise HeldOpenError(f"somebody has it open ({error.strerror})") from error
            raise

    def _is_held_open(self, path: str) -> bool:
        """Return whether somebody has a file open: then nobody else can have it for himself."""
        try:
            with self._opened(path, _ACCESS.FILE_READ_DATA, _PLAIN, sharing=0):
                return False
        except OSError as error:
            return getattr(error, "ntstatus", 0) in (NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)

    def rename_new(self, source: str, target: str) -> None:
        self._rename(source, target, replace=False)

    def remove(self, path: str) -> None:
        options = _PLAIN | CreateOptions.FILE_DELETE_ON_CLOSE | _LINKS_AS_THEY_ARE
        try:
            with self._opened(path, _ACCESS.DELETE, options):
                pass
        except OSError as error:
            if getattr(error, "ntstatus", 0) != NtStatus.STATUS_DELETE_PENDING:  # removed, but still open somewhere
                raise

    def make_directory(self, path: str) -> None:
        with self._errors():
            self._open(path, DirectoryAccessMask.FILE_LIST_DIRECTORY, CreateDisposition.FILE_CREATE, _FOLDER).close()

    def remove_directory(self, path: str) -> None:
        disposition = FileDispositionInformation()
        disposition["delete_pending"] = True
        with self._opened(path, _ACCESS.DELETE | _ACCESS.FILE_READ_ATTRIBUTES, _FOLDER) as folder:
            self._set(folder, disposition)

    def sync_directory(self, path: str) -> None:
        access = DirectoryAccessMask.FILE_ADD_FILE | DirectoryAccessMask.FILE_ADD_SUBDIRECTORY
        try:
            with self._opened(path, access, _FOLDER) as folder:
                folder.flush()
        except ConnectionLostError:
            raise
        except OSError:  # Windows does not sync directories, and need not
            pass

    def free_nbytes(self, path: str) -> int | None:
        with self._opened(path, _ACCESS.FILE_READ_ATTRIBUTES, _FOLDER) as folder:
            found = self._query(folder, FileFsFullSizeInformation)
        unit = found["sectors_per_unit"].get_value() * found["bytes_per_sector"].get_value()
        return int(found["caller_available_units"].get_value() * unit)


def _entry(name: str, attributes: Any, nbytes: int, modified: datetime) -> Entry:
    bits = int(attributes)
    if bits & FileAttributes.FILE_ATTRIBUTE_REPARSE_POINT:
        kind = "other"
    else:
        kind = "directory" if bits & FileAttributes.FILE_ATTRIBUTE_DIRECTORY else "file"
    return Entry(name, kind, int(nbytes), modified.timestamp())  # type: ignore[arg-type]
