"""What can be asked of an SMB server.

Reads and writes are requests of 1 MiB, as many at once as the server's credits allow: smb_transfers.py. All else is
asked through smbprotocol: smb_requests.py.
"""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from smbprotocol.exceptions import SMBResponseException
from smbprotocol.file_info import (
    FileAttributes,
    FileDispositionInformation,
    FileFsFullSizeInformation,
    FileInformationClass,
    FileLinkInformation,
    FileRenameInformation,
    FileStandardInformation,
)
from smbprotocol.header import NtStatus
from smbprotocol.open import (
    CreateDisposition,
    CreateOptions,
    DirectoryAccessMask,
    FilePipePrinterAccessMask,
)

from dcp_nvcomp.storage.file_servers.session import ConnectionLostError, Entry, HeldOpenError, RemoteFile, Session
from dcp_nvcomp.storage.file_servers.smb_requests import SmbRequests, ntstatus_of

if TYPE_CHECKING:
    from dcp_nvcomp.storage.file_servers.smb_login import SmbConnection

_REQUEST_NBYTES: Final = 1 << 20
_REQUESTS_ON_THEIR_WAY: Final = 16
_LISTED_NBYTES: Final = 1 << 16
_ACCESS: Final = FilePipePrinterAccessMask
_PLAIN: Final = CreateOptions.FILE_NON_DIRECTORY_FILE
_FOLDER: Final = CreateOptions.FILE_DIRECTORY_FILE
_LINKS_AS_THEY_ARE: Final = CreateOptions.FILE_OPEN_REPARSE_POINT
_FAILED_FLUSH: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
_HELD_OPEN: Final = (NtStatus.STATUS_ACCESS_DENIED, NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)


@dataclass
class _Write:
    """A write that was begun.

    Attributes:
        waiting: its requests that were not answered yet.
    """

    waiting: deque[Any]


class SmbSession(Session):
    """What one attempt does on a connection."""

    def __init__(self, connection: SmbConnection) -> None:
        self._connection, self._wire, self._transfers = connection, connection.wire, connection.transfers
        self._requests = SmbRequests(connection)

    def owns(self, file: RemoteFile) -> bool:
        return file.connection is self._connection

    # --- files --------------------------------------------------------------------------------------------------

    def _file(self, path: str, access: int, disposition: int) -> RemoteFile:
        with self._requests.errors():
            return RemoteFile(self._connection, path, self._requests.open(path, access, disposition, _PLAIN))

    def open_to_read(self, path: str) -> RemoteFile:
        access = _ACCESS.FILE_READ_DATA | _ACCESS.FILE_READ_ATTRIBUTES
        try:
            return self._file(path, access, CreateDisposition.FILE_OPEN)
        except OSError as error:
            if ntstatus_of(error) == NtStatus.STATUS_SHARING_VIOLATION:
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
        waiting: deque[tuple[int, int, Any]] = deque()
        try:
            with self._requests.errors():
                return self._read_into(file, start, buffer, waiting)
        finally:
            self._transfers.abandon(begun for _, _, begun in waiting)

    def _read_into(self, file: RemoteFile, start: int, buffer: memoryview, waiting: deque[tuple[int, int, Any]]) -> int:
        step = min(_REQUEST_NBYTES, self._wire.max_read_size)
        position, end = 0, len(buffer)
        while waiting or position < end:
            length = min(step, end - position)
            if length > 0 and self._may_send(len(waiting), length):
                length = self._transfers.room(length)
                begun = self._transfers.begin_read(file.handle, start + position, buffer[position : position + length])
                waiting.append((position, length, begun))
                position += length
                continue
            begin, length, begun = waiting[0]
            nbytes = self._transfers.end(begun)
            waiting.popleft()
            if nbytes < length and begin + nbytes < end:
                end, position = begin + nbytes, max(position, begin + nbytes)
                if nbytes:  # the server gave less than there is, or the file ends here: ask again to know
                    while waiting:
                        self._transfers.end(waiting[0][2])
                        waiting.popleft()
                    return end + self._read_into(file, start + end, buffer[end:], waiting)
        return end

    def _may_send(self, waiting: int, nbytes: int) -> bool:
        return waiting < _REQUESTS_ON_THEIR_WAY and (not waiting or self._transfers.has_credits(nbytes))

    def begin_write(self, file: RemoteFile, start: int, data: bytes) -> _Write:
        begun = _Write(deque())
        with self._requests.errors():
            step = min(_REQUEST_NBYTES, self._wire.max_write_size)
            view, position = memoryview(data), 0
            while position < len(view):
                while begun.waiting and not self._may_send(len(begun.waiting), min(step, len(view) - position)):
                    self._transfers.end(begun.waiting.popleft())
                piece = view[position : position + self._transfers.room(min(step, len(view) - position))]
                begun.waiting.append(self._transfers.begin_write(file.handle, start + position, piece))
                position += len(piece)
        return begun

    def end_write(self, begun: _Write) -> None:
        with self._requests.errors():
            while begun.waiting:
                self._transfers.end(begun.waiting.popleft())

    def sync(self, file: RemoteFile) -> None:
        with self._requests.errors():
            file.handle.flush()

    def nbytes(self, file: RemoteFile) -> int:
        with self._requests.errors():
            return int(self._requests.query(file.handle, FileStandardInformation)["end_of_file"].get_value())

    def close(self, file: RemoteFile) -> None:
        with self._requests.errors():
            file.handle.close()

    # --- names --------------------------------------------------------------------------------------------------

    def look_up(self, path: str) -> Entry | None:
        try:
            with self._requests.opened(path, _ACCESS.FILE_READ_ATTRIBUTES, _LINKS_AS_THEY_ARE) as found:
                entry = _entry(path.rpartition("/")[2], found.file_attributes, found.end_of_file, found.last_write_time)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return entry

    def file_nbytes(self, path: str) -> int | None:
        try:
            with self._requests.opened(path, _ACCESS.FILE_READ_ATTRIBUTES) as found:
                entry = _entry("", found.file_attributes, found.end_of_file, found.last_write_time)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return entry.nbytes if entry.kind == "file" else None

    def list(self, path: str) -> list[Entry]:
        entries: list[Entry] = []
        access = DirectoryAccessMask.FILE_LIST_DIRECTORY | DirectoryAccessMask.FILE_READ_ATTRIBUTES
        with self._requests.opened(path, access, _FOLDER) as folder:
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
        self._name(source, target, information, _ACCESS.DELETE | _ACCESS.FILE_READ_ATTRIBUTES)

    def _name(self, source: str, target: str, information: Any, access: int) -> None:
        information["file_name"] = self._requests.name(target)
        with self._requests.opened(source, access, _PLAIN) as file:
            self._requests.change(file, information)

    def replace(self, source: str, target: str) -> None:
        try:
            self._rename(source, target, replace=True)
        except OSError as error:
            if ntstatus_of(error) in _HELD_OPEN and self._is_held_open(target):
                raise HeldOpenError(f"somebody has it open ({error.strerror})") from error
            raise

    def _is_held_open(self, path: str) -> bool:
        """Return whether somebody has a file open: then nobody else can have it for himself."""
        try:
            with self._requests.opened(path, _ACCESS.FILE_READ_DATA, _PLAIN, sharing=0):
                return False
        except OSError as error:
            return ntstatus_of(error) in (NtStatus.STATUS_SHARING_VIOLATION, NtStatus.STATUS_DELETE_PENDING)

    def rename_new(self, source: str, target: str) -> None:
        # Samba first looks for the name and then renames: of two clients at once, both may succeed. It makes a second
        # name for a file in one step.
        try:
            self._name(source, target, FileLinkInformation(), _ACCESS.FILE_WRITE_ATTRIBUTES)
        except (FileExistsError, FileNotFoundError, ConnectionLostError):
            raise
        except OSError:  # the server's file system has no second names (FAT)
            self._rename(source, target, replace=False)
        else:
            self.remove(source)

    def remove(self, path: str) -> None:
        options = _PLAIN | CreateOptions.FILE_DELETE_ON_CLOSE | _LINKS_AS_THEY_ARE
        with self._requests.opened(path, _ACCESS.DELETE, options):
            pass

    def make_directory(self, path: str) -> None:
        with self._requests.errors():
            self._requests.open(
                path, DirectoryAccessMask.FILE_LIST_DIRECTORY, CreateDisposition.FILE_CREATE, _FOLDER
            ).close()

    def remove_directory(self, path: str) -> None:
        disposition = FileDispositionInformation()
        disposition["delete_pending"] = True
        with self._requests.opened(path, _ACCESS.DELETE | _ACCESS.FILE_READ_ATTRIBUTES, _FOLDER) as folder:
            self._requests.change(folder, disposition)

    def sync_directory(self, path: str) -> None:
        access = DirectoryAccessMask.FILE_ADD_FILE | DirectoryAccessMask.FILE_ADD_SUBDIRECTORY
        try:
            with self._requests.opened(path, access, _FOLDER) as folder:
                folder.flush()
        except OSError as error:  # Windows does not sync directories, and need not
            if isinstance(error, ConnectionLostError) or error.errno in _FAILED_FLUSH:
                raise

    def free_nbytes(self, path: str) -> int | None:
        with self._requests.opened(path, _ACCESS.FILE_READ_ATTRIBUTES, _FOLDER) as folder:
            found = self._requests.query(folder, FileFsFullSizeInformation)
        unit = found["sectors_per_unit"].get_value() * found["bytes_per_sector"].get_value()
        return int(found["caller_available_units"].get_value() * unit)


def _entry(name: str, attributes: Any, nbytes: int, modified: datetime) -> Entry:
    bits = int(attributes)
    if bits & FileAttributes.FILE_ATTRIBUTE_REPARSE_POINT:
        kind = "other"
    else:
        kind = "directory" if bits & FileAttributes.FILE_ATTRIBUTE_DIRECTORY else "file"
    return Entry(name, kind, int(nbytes), modified.timestamp())  # type: ignore[arg-type]
