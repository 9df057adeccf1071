"""What can be asked of an SMB server, by smbprotocol: requests of 1 MiB, as many at once as its credits allow."""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from smbprotocol.exceptions import SMBException, SMBResponseException
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
    SMB2QueryInfoRequest,
    SMB2QueryInfoResponse,
    SMB2SetInfoRequest,
)

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.storage.file_servers.session import ConnectionLostError, Entry, HeldOpenError, RemoteFile, Session
from dcp_nvcomp.storage.file_servers.smb_status import ERRNO, LOST

if TYPE_CHECKING:
    from dcp_nvcomp.storage.file_servers.smb_login import SmbConnection

__all__ = ["SmbSession"]

_REQUEST_NBYTES: Final = 1 << 20
_REQUESTS_ON_THEIR_WAY: Final = 16
_CREDITS: Final = 512  # how many we want to have, for so many requests and as many again
_CREDIT_NBYTES: Final = 1 << 16
_LISTED_NBYTES: Final = 1 << 16
_ACCESS: Final = FilePipePrinterAccessMask
_PLAIN: Final = CreateOptions.FILE_NON_DIRECTORY_FILE
_FOLDER: Final = CreateOptions.FILE_DIRECTORY_FILE
_LINKS_AS_THEY_ARE: Final = CreateOptions.FILE_OPEN_REPARSE_POINT
_HELD_OPEN: Final = (NtStatus.STATUS_ACCESS_DENIED, NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)


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
            if error.status in LOST:
                self._connection.cut()
                raise ConnectionLostError(words) from error
            failure = OSError(ERRNO.get(error.status, errno.EIO), words)
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
        access = _ACCESS.FILE_READ_DATA | _ACCESS.FILE_READ_ATTRIBUTES
        try:
            return self._file(path, access, CreateDisposition.FILE_OPEN)
        except OSError as error:
            if _status(error) == NtStatus.STATUS_SHARING_VIOLATION:
                raise HeldOpenError(f"somebody has it for himself ({error.strerror})") from error
            raise

    def create(self, path: str) -> RemoteFile:
        access = _ACCESS.FILE_READ_DATA | _ACCESS.FILE_WRITE_DATA | _ACCESS.FILE_READ_ATTRIBUTES
        try:
            return self._file(path, access, CreateDisposition.FILE_CREATE)
        except IsADirectoryError as error:
            raise FileExistsError(errno.EEXIST, error.strerror) from error

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
            if _status(error) in _HELD_OPEN and self._is_held_open(target):
                raise HeldOpenError(f"somebody has it open ({error.strerror})") from error
            raise

    def _is_held_open(self, path: str) -> bool:
        """Return whether somebody has a file open: then nobody else can have it for himself."""
        try:
            with self._opened(path, _ACCESS.FILE_READ_DATA, _PLAIN, sharing=0):
                return False
        except OSError as error:
            return _status(error) in (NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)

    def rename_new(self, source: str, target: str) -> None:
        self._rename(source, target, replace=False)

    def remove(self, path: str) -> None:
        options = _PLAIN | CreateOptions.FILE_DELETE_ON_CLOSE | _LINKS_AS_THEY_ARE
        with self._opened(path, _ACCESS.DELETE, options):
            pass

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


def _status(error: OSError) -> int:
    return int(getattr(error, "ntstatus", 0))


def _entry(name: str, attributes: Any, nbytes: int, modified: datetime) -> Entry:
    bits = int(attributes)
    if bits & FileAttributes.FILE_ATTRIBUTE_REPARSE_POINT:
        kind = "other"
    else:
        kind = "directory" if bits & FileAttributes.FILE_ATTRIBUTE_DIRECTORY else "file"
    return Entry(name, kind, int(nbytes), modified.timestamp())  # type: ignore[arg-type]
