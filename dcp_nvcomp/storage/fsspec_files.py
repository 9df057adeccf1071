"""Any file system that fsspec knows and that has no implementation of its own here."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from fsspec.spec import AbstractBufferedFile

from dcp_nvcomp.errors import ConcurrentSaveError, StorageError
from dcp_nvcomp.storage.base import (
    FileInfo,
    OutputStream,
    storage_errors,
    too_short,
)
from dcp_nvcomp.storage.remote import RemoteFilesystem

__all__ = ["FsspecFilesystem"]

logger = logging.getLogger(__name__)


# What fsspec's filesystems call the time of the last write, in `info` and `ls`.
_MODIFIED = ("LastModified", "mtime", "modified", "updated", "last_modified", "created")


def _modified_seconds(info: Mapping[str, Any]) -> float | None:
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.replace(tzinfo=value.tzinfo or timezone.utc).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                parsed = datetime.fromisoformat(value.replace("Z", "+00:00"))
                return parsed.replace(tzinfo=parsed.tzinfo or timezone.utc).timestamp()
    return None


class FsspecFilesystem(RemoteFilesystem):
    """Whatever fsspec reaches, other than local disks and S3.

    Files are published by one PUT (`pipe_file`). That is atomic on object stores; on other remote filesystems it is
    as atomic as their fsspec implementation makes it. Retries are the client's own.
    """

    def __init__(self, path: str, fs: Any, root: str, *, part_nbytes: int, makes_directories: bool) -> None:
        super().__init__(path, root, part_nbytes)
        self._fs = fs
        self._makes_directories = makes_directories

    def create_directory(self) -> None:
        if self._makes_directories:
            with storage_errors("create the directory", self.path):
                self._fs.makedirs(self._root, exist_ok=True)

    def open_output(self, name: str) -> OutputStream:
        return _FsspecOutput(self._fs, self._key(name), self.location(name), self._part_nbytes)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        refusal = ConcurrentSaveError("Another save has published here already.", path=self.location(name))
        # Only a check: two saves that publish at the very same time both pass it, and where the filesystem has no
        # exclusive mode the later one stays.
        if not overwrite and self.file_nbytes(name) is not None:
            raise refusal
        exclusive = {"mode": "create"} if not overwrite and self._knows_exclusive_mode() else {}
        with storage_errors("write", self.location(name), may_be_done=True):
            try:
                self._fs.pipe_file(self._key(name), data, **exclusive)
            except FileExistsError as error:
                if not exclusive:
                    raise
                raise refusal from error

    def _knows_exclusive_mode(self) -> bool:
        method = getattr(self._fs, "_pipe_file", None) or self._fs.pipe_file
        return "mode" in inspect.signature(method).parameters

    def _get(self, name: str, start: int, stop: int) -> bytes:
        try:
            with storage_errors("read", self.location(name)):
                data: bytes = self._fs.cat_file(self._key(name), start=start, end=stop)
        except StorageError as error:
            if error.errno == errno.EINVAL:  # what clients make of "416 range not satisfiable", among others
                nbytes = self.file_nbytes(name)
                if nbytes is not None and nbytes <= start:
                    raise too_short(self.location(name), start, stop, nbytes) from error
            raise
        return data

    def file_nbytes(self, name: str) -> int | None:
        key = self._key(name)
        with storage_errors("look up", self.location(name)):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(key)
            except FileNotFoundError:
                return None
            return int(info["size"]) if info["type"] == "file" else None

    def list_files(self) -> list[FileInfo]:
        with storage_errors("list", self.path):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        inside = [
            FileInfo(item["name"].removeprefix(f"{self._root}/"), int(item["size"] or 0), _modified_seconds(item))
            for item in found
            if item["type"] == "file"
        ]
        return sorted((file for file in inside if file.name and "/" not in file.name), key=lambda file: file.name)

    def now_seconds(self) -> float:
        with storage_errors("ask for the time", self.path):
            key = f"{self._root}/.clock-{uuid.uuid4().hex}"
            self._fs.pipe_file(key, b"")
            try:
                seconds = _modified_seconds(self._fs.info(key))
            finally:
                self._fs.rm_file(key)
        if seconds is None:
            raise StorageError("The storage does not tell when files were written.", path=self.path)
        return seconds

    def _remove(self, name: str) -> None:
        with storage_errors("remove", self.location(name)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._key(name))  # not rm(), which expands wildcards and loses errors


class _FsspecOutput(OutputStream):
    def __init__(self, fs: Any, key: str, location: str, part_nbytes: int) -> None:
        self._fs, self._key, self._location = fs, key, location
        self._state = "open"  # then "broken", "closed" or "aborted"
        with storage_errors("create", location):
            self._file = fs.open(key, "wb", block_size=part_nbytes)

    def write(self, data: memoryview | bytes) -> None:
        assert self._state == "open"
        with self._broken_unless_done("write"):
            self._file.write(memoryview(data).cast("B"))

    def close(self) -> None:
        assert self._state == "open"
        with self._broken_unless_done("write"):
            self._file.close()
        self._state = "closed"

    @contextlib.contextmanager
    def _broken_unless_done(self, what: str) -> Iterator[None]:
        self._state, before = "broken", self._state
        with storage_errors(what, self._location):
            yield
        self._state = before

    def abort(self) -> None:
        if self._state in ("closed", "aborted"):
            return
        may_exist = self._state == "broken"  # a close that failed may have been heard nevertheless
        self._state = "aborted"
        try:
            if not self._discard():
                self._file.close()
                may_exist = True
        except Exception as error:
            logger.warning("Could not discard %s, an unfinished upload may be left: %s", self._location, error)
        if may_exist:
            try:
                self._fs.rm_file(self._key)
            except FileNotFoundError:
                pass
            except Exception as error:
                logger.warning("Could not remove the unfinished %s: %s", self._location, error)

    def _discard(self) -> bool:
        """Throw away what was uploaded so far; False where this kind of file can't."""
        if not isinstance(self._file, AbstractBufferedFile) or type(self._file).discard is AbstractBufferedFile.discard:
            return False
        self._file.closed = True  # its close() and __del__ would commit the truncated file
        self._file.discard()
        return True

    def __del__(self) -> None:
        # Dropped without close or abort. Commit nothing; and no requests here, the loop may be gone.
        if getattr(self, "_state", "closed") in ("open", "broken") and isinstance(
            getattr(self, "_file", None), AbstractBufferedFile
        ):
            self._file.closed = True
