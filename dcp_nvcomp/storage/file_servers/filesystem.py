"""A checkpoint's directory on an SFTP or SMB server."""

from __future__ import annotations

import contextlib
import errno
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp_nvcomp.errors import ConfigurationError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import (
    BESIDE,
    FileInfo,
    OutputStream,
    RecursiveListing,
    check_name,
    clock_name,
    temporary_name,
    too_short,
)
from dcp_nvcomp.storage.file_servers.client import Connection, Entry, ServerClient
from dcp_nvcomp.storage.file_servers.urls import SMB, ServerPlace, sftp_place, smb_place
from dcp_nvcomp.storage.file_servers.writing import ServerOutput, move, publish, remove_quietly
from dcp_nvcomp.storage.fsspec_output import Replacement
from dcp_nvcomp.storage.remote import RemoteFilesystem


def open_file_server(
    path: str, options: Mapping[str, Any], deadline_seconds: float, known_options: Sequence[str] = ()
) -> ServerFilesystem:
    """Open the place of one checkpoint; nothing is sent yet."""
    protocol = path.partition("://")[0]
    connection: Callable[[ServerPlace], Connection]
    try:
        if protocol in SMB:
            from dcp_nvcomp.storage.file_servers.smb import SmbConnection

            connection, place = SmbConnection, smb_place(path, options, known_options)
        else:
            from dcp_nvcomp.storage.file_servers.sftp import SftpConnection

            connection, place = SftpConnection, sftp_place(path, options, known_options)
    except ImportError as error:
        extra = "smb" if protocol in SMB else "sftp"
        raise ConfigurationError(f"{protocol}:// is not available here: pip install 'dcp-nvcomp[{extra}]'.") from error
    secrets = {name: place.client.get(name) for name in ("password", "passphrase")}
    hidden = {**options, **secrets}
    client = ServerClient(lambda: connection(place), place.server, deadline_seconds, Redactor(path, hidden))
    return ServerFilesystem(path, place.path, client, part_nbytes=place.part_nbytes, options=hidden)


class ServerFilesystem(RemoteFilesystem):
    """Files on an SFTP or SMB server."""

    parallel_reads = 4

    def __init__(
        self, path: str, root: str, client: ServerClient, *, part_nbytes: int, options: Mapping[str, Any]
    ) -> None:
        super().__init__(path, root, part_nbytes, options)
        self._client = client

    def create_directory(self) -> None:
        self._client.run("create the directory", self.path, self._make_directory)

    async def _make_directory(self, connection: Connection) -> None:
        missing: list[str] = []
        folder = self._root
        while folder and (entry := await connection.look_up(folder)) is None:
            missing.append(folder)
            folder = folder.rpartition("/")[0]
        if folder and entry is not None and entry.kind == "file":
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process made it since
                await connection.make_directory(folder)
        # their names, and that of the last one also if another process made it and was interrupted then
        for folder in missing or [self._root]:
            await connection.sync_directory(posixpath.dirname(folder))

    def remove_directory(self) -> None:
        async def remove(connection: Connection) -> None:
            try:
                await connection.remove_directory(self._root)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EBUSY):
                    raise

        self._client.run("remove the directory", self.path, remove)

    def free_nbytes(self) -> int | None:
        async def look_up(connection: Connection) -> int | None:
            existing = self._root
            while existing and await connection.look_up(existing) is None:
                existing = existing.rpartition("/")[0]
            return await connection.free_nbytes(existing or "/")

        return self._client.run("look up the free space", self.path, look_up)

    def list_files(self) -> list[FileInfo]:
        async def files(connection: Connection) -> list[FileInfo]:
            found = []
            for entry in await _listed(connection, self._root):
                nbytes: int | None = entry.nbytes
                if entry.kind == "other":  # a link is what it leads to, as for readers
                    nbytes = await connection.file_nbytes(f"{self._root}/{entry.name}")
                if entry.kind != "directory" and nbytes is not None:
                    found.append(FileInfo(entry.name, nbytes, entry.modified_seconds))
            return sorted(found, key=lambda file: file.name)

        return self._client.run("list", self.path, files)

    def list_folders(self) -> list[str]:
        return sorted(entry.name for entry in self._list_folder("") if entry.kind == "directory")

    def list_below(self) -> RecursiveListing:
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
                name = posixpath.join(folder, entry.name)
                if entry.kind == "directory":
                    folders.append(name)
                else:
                    files.append(FileInfo(name, entry.nbytes, entry.modified_seconds))
        return RecursiveListing(files, [], failed)

    def _list_folder(self, folder: str) -> list[Entry]:
        full = posixpath.join(self._root, folder) if folder else self._root
        where = self.location(folder) if folder else self.path
        return self._client.run("list", where, lambda connection: _listed(connection, full))

    def now_seconds(self) -> float:
        key = f"{self._root}/{clock_name()}"

        async def ask(connection: Connection) -> Entry | None:
            with contextlib.suppress(FileExistsError):  # of an attempt whose answer was lost
                await connection.write(key, 0, b"", create=True)
            return await connection.look_up(key)

        try:
            entry = self._client.run("ask for the time", self.path, ask)
        except StorageError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return time.time()  # read-only: the clock is not used
        finally:
            remove_quietly(self._client, key, self.path)
        if entry is None:
            raise StorageError("The file that was to show the server's time is gone.", path=self.path)
        return entry.modified_seconds

    def open_output(self, name: str) -> OutputStream:
        return ServerOutput(self._client, self._key(name), self.location(name), self._part_nbytes)

    def open_replacement(self, name: str) -> OutputStream:
        key, where = self._key(name), self.location(name)
        temporary = temporary_name(key)
        written = ServerOutput(self._client, temporary, where, self._part_nbytes)
        return Replacement(written, lambda: move(self._client, temporary, key, where, written.nbytes, written.checksum))

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        publish(self._client, self._key(name), data, self.location(name), overwrite=overwrite)

    def _key(self, name: str) -> str:
        name = check_name(name, path=self.path)
        if name.startswith(BESIDE):
            return f"{posixpath.dirname(self._root)}/{name.removeprefix(BESIDE)}"
        return f"{self._root}/{name}"

    def _get(self, name: str, start: int, stop: int) -> bytes:
        key, where = self._key(name), self.location(name)
        data, nbytes = self._client.run("read", where, lambda connection: connection.read(key, start, stop))
        if nbytes <= start:
            raise too_short(where, start, stop, nbytes)
        return data

    def file_nbytes(self, name: str) -> int | None:
        key = self._key(name)
        return self._client.run("look up", self.location(name), lambda connection: connection.file_nbytes(key))

    def _remove(self, name: str) -> None:
        async def remove(connection: Connection) -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                await connection.remove(self._key(name))

        self._client.run("remove", self.location(name), remove)

    def close(self) -> None:
        self._client.close()


async def _listed(connection: Connection, folder: str) -> list[Entry]:
    try:
        return await connection.list(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
