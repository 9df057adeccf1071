"""A checkpoint's directory on a file server.

data files    written front to back in parts, synced: output.py
publish       a temporary that takes the name of the file in one step: publish.py
requests      sftp.py and smb.py send them, pool.py repeats what a lost connection interrupted
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import time
from collections.abc import Mapping
from typing import Any, Final

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import Below, FileInfo, OutputStream, check_relative_path, too_short
from dcp_nvcomp.storage.file_servers.output import PART_COPIES, ServerOutput
from dcp_nvcomp.storage.file_servers.pool import Pool
from dcp_nvcomp.storage.file_servers.publish import publish, remove_quietly, take_place
from dcp_nvcomp.storage.file_servers.session import Entry, Session
from dcp_nvcomp.storage.fsspec_output import Replacement
from dcp_nvcomp.storage.remote import RemoteFilesystem
from dcp_nvcomp.storage.temporary import clock_name, temporary_name

_PARALLEL_READS: Final = 4
_PARALLEL_WRITES: Final = 4


class ServerFilesystem(RemoteFilesystem):
    """Files on an SFTP or SMB server."""

    parallel_reads = _PARALLEL_READS
    read_copies = 2

    def __init__(self, path: str, root: str, pool: Pool, *, part_nbytes: int, options: Mapping[str, Any]) -> None:
        super().__init__(path, root, part_nbytes, options)
        self._pool = pool

    def output_streams(self, thread_count: int, memory_budget: int) -> int:
        return max(1, min(_PARALLEL_WRITES, memory_budget // (PART_COPIES * self._part_nbytes)))

    # --- directories ----------------------------------------------------------------------------------------------

    def create_directory(self) -> None:
        self._pool.run("create the directory", self.path, self._make_directory)

    def _make_directory(self, session: Session) -> None:
        missing: list[str] = []
        folder = self._root
        while folder and (entry := session.look_up(folder)) is None:
            missing.append(folder)
            folder = folder.rpartition("/")[0]
        if folder and entry is not None and entry.kind == "file":
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process made it since
                session.make_directory(folder)
        # their names, and that of the last one also if somebody else made it and was interrupted then
        for folder in missing or [self._root]:
            session.sync_directory(posixpath.dirname(folder))

    def remove_directory(self) -> None:
        def remove(session: Session) -> None:
            try:
                session.remove_directory(self._root)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EBUSY):
                    raise

        self._pool.run("remove the directory", self.path, remove)

    def free_nbytes(self) -> int | None:
        def look_up(session: Session) -> int | None:
            existing = self._root
            while existing and session.look_up(existing) is None:
                existing = existing.rpartition("/")[0]
            return session.free_nbytes(existing or "/")

        return self._pool.run("look up the free space", self.path, look_up)

    def list_files(self) -> list[FileInfo]:
        return self._pool.run("list", self.path, self._files)

    def _files(self, session: Session) -> list[FileInfo]:
        files = []
        for entry in _listed(session, self._root):
            if entry.kind == "file":
                files.append(_info(entry))
            elif entry.kind == "other":  # a link is what it leads to, as it is to who reads
                nbytes = session.file_nbytes(f"{self._root}/{entry.name}")
                if nbytes is not None:
                    files.append(FileInfo(entry.name, nbytes, entry.modified_seconds))
        return sorted(files, key=lambda file: file.name)

    def list_folders(self) -> list[str]:
        return sorted(entry.name for entry in self._list_folder("") if entry.kind == "directory")

    def list_below(self) -> Below:
        files: list[FileInfo] = []
        failed: dict[str, StorageError] = {}
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                found = self._list_folder(folder)
            except StorageError as error:
                if not folder or error.errno == errno.ETIMEDOUT:
                    raise
                failed[folder] = error
                continue
            for entry in found:
                relative = posixpath.join(folder, entry.name)
                if entry.kind == "directory":
                    folders.append(relative)
                else:
                    files.append(_info(entry, relative))
        return Below(files, [], failed)

    def _list_folder(self, folder: str) -> list[Entry]:
        full = posixpath.join(self._root, folder) if folder else self._root
        where = self.location(folder) if folder else self.path
        return self._pool.run("list", where, lambda session: _listed(session, full))

    def now_seconds(self) -> float:
        key = f"{self._root}/{clock_name()}"

        def ask(session: Session) -> Entry | None:
            with contextlib.suppress(FileExistsError):  # of an attempt whose answer was lost
                session.close(session.create(key))
            return session.look_up(key)

        try:
            entry = self._pool.run("ask for the time", self.path, ask)
        except StorageError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return time.time()  # of who may not write, nothing depends on it
        finally:
            remove_quietly(self._pool, key, self.path)
        if entry is None:
            raise StorageError("The file that was to tell the server's time is gone.", path=self.path)
        return entry.modified_seconds

    # --- files ----------------------------------------------------------------------------------------------------

    def open_output(self, name: str) -> OutputStream:
        return ServerOutput(self._pool, self._key(name), self.location(name), self._part_nbytes)

    def open_replacement(self, name: str) -> OutputStream:
        key, where = self._key(name), self.location(name)
        temporary = temporary_name(key)
        written = ServerOutput(self._pool, temporary, where, self._part_nbytes)
        return Replacement(written, lambda: take_place(self._pool, temporary, key, where, written.content))

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        publish(self._pool, self._key(name), data, self.location(name), overwrite=overwrite)

    def _key(self, name: str) -> str:
        return f"{self._root}/{check_relative_path(name, path=self.path)}"

    def _get(self, name: str, start: int, stop: int) -> bytes:
        where = self.location(name)

        def get(session: Session) -> bytes:
            file = session.open_to_read(self._key(name))
            try:
                nbytes = session.nbytes(file)  # before memory is taken for a size that only a footer claims
                if nbytes <= start:
                    raise too_short(where, start, stop, nbytes)
                found = bytearray(min(stop, nbytes) - start)
                got = session.read_into(file, start, memoryview(found))
            finally:
                session.close(file)
            return bytes(memoryview(found)[:got])

        return self._pool.run("read", where, get)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        target, where = buffer.cast("B"), self.location(name)
        key = self._key(name)
        if not target:
            return

        def read(session: Session) -> int:
            file = session.open_to_read(key)
            try:
                return session.read_into(file, start, target)
            finally:
                session.close(file)

        got = self._pool.run("read", where, read)
        if got < len(target):
            nbytes = self.file_nbytes(name)
            raise too_short(where, start, start + len(target), start + got if got or nbytes is None else nbytes)

    def file_nbytes(self, name: str) -> int | None:
        key = self._key(name)
        return self._pool.run("look up", self.location(name), lambda session: session.file_nbytes(key))

    def _remove(self, name: str) -> None:
        def remove(session: Session) -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                session.remove(self._key(name))

        self._pool.run("remove", self.location(name), remove)

    def close(self) -> None:
        self._pool.close()


def _listed(session: Session, folder: str) -> list[Entry]:
    try:
        return session.list(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _info(entry: Entry, name: str | None = None) -> FileInfo:
    return FileInfo(name or entry.name, entry.nbytes, entry.modified_seconds)
