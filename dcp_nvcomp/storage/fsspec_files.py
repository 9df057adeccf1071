"""Any file system that fsspec knows and that has no implementation of its own here."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from fsspec.spec import AbstractBufferedFile

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import (
    FileInfo,
    OutputStream,
    already_published,
    check_relative_path,
    is_not_found,
    storage_errors,
    too_short,
)
from dcp_nvcomp.storage.moving import Moves
from dcp_nvcomp.storage.remote import RemoteFilesystem
from dcp_nvcomp.storage.temporary import clock_name, temporary_name

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
    """Whatever fsspec reaches, other than local disks and S3. Retries are the client's own.

    An object store's PUT replaces an object in one step, so a small file is published by one. Elsewhere it is written
    under a temporary name and moved to its own (moving.py). If the filesystem refuses to move it over an existing
    file, that one is moved aside first; if it can't move files at all, the file is written in place. Both warn: a save
    that is interrupted there leaves no `.metadata`, or a torn one, and `recover` is needed.

    Args:
        path: the checkpoint, as the user gave it.
        fs: the fsspec filesystem.
        root: its keys' beginning.
        options: the storage options, which hold secrets.
        part_nbytes: how long the parts of large files are.
        is_object_store: whether a PUT is atomic, and directories do not exist.
    """

    def __init__(
        self, path: str, fs: Any, root: str, *, options: Mapping[str, Any], part_nbytes: int, is_object_store: bool
    ) -> None:
        super().__init__(path, root, part_nbytes, options)
        self._fs = fs
        self._is_object_store = is_object_store
        self._moves = Moves(fs)

    def create_directory(self) -> None:
        if not self._is_object_store:
            with self._errors("create the directory", self.path):
                self._fs.makedirs(self._root, exist_ok=True)

    def open_output(self, name: str) -> OutputStream:
        return _FsspecOutput(self._fs, self._key(name), self.location(name), self._part_nbytes, self._redact)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        check_relative_path(name, path=self.path)
        # Only a check: two saves that publish at the very same time both pass it, and if the filesystem has no
        # exclusive mode the later one wins.
        if not overwrite and self.file_nbytes(name) is not None:
            raise already_published(self.location(name))
        if self._is_object_store or not self._moves.can_move:
            self._put(name, data, overwrite=overwrite)
        else:
            self._put_by_move(name, data, overwrite=overwrite)

    def _put_by_move(self, name: str, data: bytes, *, overwrite: bool) -> None:
        temporary = temporary_name(name)
        try:
            with self._errors("write", self.location(name)):
                self._fs.pipe_file(self._key(temporary), data)
            with self._errors("write", self.location(name), may_be_done=True):
                self._move_into_place(temporary, name, overwrite=overwrite)
        except BaseException:
            self._remove_quietly(temporary)
            raise

    def _put(self, name: str, data: bytes, *, overwrite: bool) -> None:
        tears = overwrite and not self._is_object_store and self.file_nbytes(name) is not None
        if tears:
            self._warn_of_gap()
        exclusive = {"mode": "create"} if not overwrite and self._knows_exclusive_mode() else {}
        try:
            with self._errors("write", self.location(name), may_be_done=True):
                try:
                    self._fs.pipe_file(self._key(name), data, **exclusive)
                except FileExistsError as error:
                    if not exclusive:
                        raise
                    raise already_published(self.location(name)) from error
        except StorageError as error:
            if tears:
                error.message += f" {name} may be torn now: if it can't be read, run `dcp-nvcomp recover`."
            raise

    def _knows_exclusive_mode(self) -> bool:
        method = getattr(self._fs, "_pipe_file", None) or self._fs.pipe_file
        return "mode" in inspect.signature(method).parameters

    def _move_into_place(self, temporary: str, name: str, *, overwrite: bool) -> None:
        if overwrite and self._moves.can_replace:
            self._moves.replace(self._fs, self._key(temporary), self._key(name))
            return
        refusal = self._try_to_move(temporary, name)
        if refusal is None:
            return
        if not overwrite:
            raise already_published(self.location(name)) from refusal
        self._warn_of_gap()
        aside = temporary_name(name)
        try:
            for source, target in ((name, aside), (temporary, name)):
                if refusal := self._try_to_move(source, target):
                    raise refusal
        except BaseException:
            with contextlib.suppress(Exception):
                self._try_to_move(aside, name)  # refused, if the new one is there after all
            raise
        self._remove_quietly(aside)

    def _try_to_move(self, source: str, target: str) -> Exception | None:
        """Move a file, and return what speaks against it if an existing target is in the way.

        Clients say so by FileExistsError, by an error without errno, or not at all (WebHDFS).
        """
        refusal: Exception = FileExistsError(errno.EEXIST, f"the storage did not move {source}")
        try:
            self._moves.move(self._fs, self._key(source), self._key(target))
        except Exception as error:
            if getattr(error, "errno", None) not in (None, 0, errno.EEXIST):
                raise
            refusal = error
        if self.file_nbytes(source) is None:
            return None
        if self.file_nbytes(target) is None:
            raise refusal
        return refusal

    def _warn_of_gap(self) -> None:
        message = (
            f"{self.path} is on a filesystem that can't replace a file in one step. If replacing this checkpoint is "
            "interrupted, `dcp-nvcomp recover` must bring back the old one or the new one."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _remove_quietly(self, name: str) -> None:
        """Remove a temporary: a failure harms nothing, so it must not hide what became of the publishing."""
        try:
            self._remove(name)
        except StorageError as error:
            logger.warning("A temporary file could not be removed: %s", error)

    def _get(self, name: str, start: int, stop: int) -> bytes:
        try:
            with self._errors("read", self.location(name)):
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
        with self._errors("look up", self.location(name)):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(key)
            except Exception as error:
                if not is_not_found(error):
                    raise
                return None
            return int(info["size"]) if info["type"] == "file" else None

    def list_files(self) -> list[FileInfo]:
        with self._errors("list", self.path):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except Exception as error:
                if not is_not_found(error) and not isinstance(error, NotADirectoryError):
                    raise
                return []
        inside = [
            FileInfo(item["name"].removeprefix(f"{self._root}/"), int(item["size"] or 0), _modified_seconds(item))
            for item in found
            if item["type"] == "file"
        ]
        return sorted((file for file in inside if file.name and "/" not in file.name), key=lambda file: file.name)

    def list_below(self) -> list[str]:
        with self._errors("list", self.path):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root)
            except Exception as error:
                if not is_not_found(error):
                    raise
                return []
        return [str(path).removeprefix(f"{self._root}/") for path in found]

    def now_seconds(self) -> float:
        with self._errors("ask for the time", self.path):
            key = f"{self._root}/{clock_name()}"
            self._fs.pipe_file(key, b"")
            try:
                seconds = _modified_seconds(self._fs.info(key))
            finally:
                self._fs.rm_file(key)
        if seconds is None:
            raise StorageError("The storage does not tell when files were written.", path=self.path)
        return seconds

    def _remove(self, name: str) -> None:
        with self._errors("remove", self.location(name)):
            try:
                self._fs.rm_file(self._key(name))  # not rm(), which expands wildcards and loses errors
            except Exception as error:
                if not is_not_found(error):
                    raise


class _FsspecOutput(OutputStream):
    def __init__(self, fs: Any, key: str, location: str, part_nbytes: int, redact: Redactor) -> None:
        self._fs, self._key, self._location, self._redact = fs, key, location, redact
        self._state = "open"  # then "broken", "closed" or "aborted"
        with storage_errors("create", location, redact):
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
        with storage_errors(what, self._location, self._redact):
            yield
        self._state = before

    def abort(self) -> None:
        if self._state in ("closed", "aborted"):
            return
        may_exist = self._state == "broken"  # a close that failed may have taken effect nevertheless
        self._state = "aborted"
        try:
            if not self._discard():
                self._file.close()
                may_exist = True
        except Exception as error:
            words = self._redact(str(error))
            logger.warning("Could not discard %s, an unfinished upload may be left: %s", self._location, words)
        if may_exist:
            try:
                self._fs.rm_file(self._key)
            except Exception as error:
                if not is_not_found(error):
                    words = self._redact(str(error))
                    logger.warning("Could not remove the unfinished %s: %s", self._location, words)

    def _discard(self) -> bool:
        """Discard what was uploaded so far; return False if this kind of file can't."""
        if not isinstance(self._file, AbstractBufferedFile) or type(self._file).discard is AbstractBufferedFile.discard:
            return False
        self._file.closed = True  # its close() and __del__ would commit the truncated file
        self._file.discard()
        return True

    def __del__(self) -> None:
        # Dropped without close or abort. Commit nothing; and send no requests here: the loop may be closed.
        if getattr(self, "_state", "closed") in ("open", "broken") and isinstance(
            getattr(self, "_file", None), AbstractBufferedFile
        ):
            self._file.closed = True
