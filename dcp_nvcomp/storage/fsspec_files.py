"""Any file system that fsspec knows and that has no implementation of its own here."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any, Final

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import (
    FileInfo,
    OutputStream,
    RecursiveListing,
    already_published,
    check_name,
    clock_name,
    is_not_found,
    temporary_name,
    too_short,
)
from dcp_nvcomp.storage.fsspec_output import FsspecOutput, Moves, Replacement, may_mean_existing, says_existing
from dcp_nvcomp.storage.remote import RemoteFilesystem

logger = logging.getLogger(__name__)


_PUT_BACK_ATTEMPTS = 3


def _finds_by_itself(fs: Any) -> bool:
    """Return True if the client has a listing of its own for all that is below a folder, as those of stores do."""
    if isinstance(fs, DirFileSystem | CachingFileSystem):
        return _finds_by_itself(fs.fs)
    return isinstance(fs, AsyncFileSystem) and type(fs)._find is not AsyncFileSystem._find


class FsspecFilesystem(RemoteFilesystem):
    """Whatever fsspec reaches, other than local disks and S3. Retries are the client's own.

    An object store's PUT replaces an object in one step, so a small file is published by one. Elsewhere it is written
    under a temporary name and moved to its own. If the filesystem certainly refuses to move it over an
    existing file, that one is moved aside first; if it can't move files at all, the file is written in place. Both
    warn: a save that is interrupted there leaves no `.metadata`, or a torn one, and `recover` is needed.
    """

    def __init__(
        self,
        path: str,
        fs: Any,
        root: str,
        *,
        options: Mapping[str, Any],
        part_nbytes: int,
        is_object_store: bool,
        one_at_a_time: bool = False,
    ) -> None:
        super().__init__(path, root, part_nbytes, options)
        self._fs = fs
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if one_at_a_time else contextlib.nullcontext()
        )
        self._is_object_store = is_object_store
        self._moves = Moves(fs)
        self._can_move = self._moves.can_move
        self._has_moved = False

    @contextlib.contextmanager
    def _errors(self, what: str, where: str, *, may_be_done: bool = False) -> Iterator[None]:
        with self._turn, super()._errors(what, where, may_be_done=may_be_done):
            yield

    def create_directory(self) -> None:
        if not self._is_object_store:
            with self._errors("create the directory", self.path):
                self._fs.makedirs(self._root, exist_ok=True)

    def open_output(self, name: str) -> OutputStream:
        return self._output(name)

    def _output(self, name: str, *, replaces: bool = False) -> FsspecOutput:
        key, where = self._key(name), self.location(name)
        return FsspecOutput(self._fs, key, where, self._part_nbytes, self._redact, replaces=replaces, turn=self._turn)

    def open_replacement(self, name: str) -> OutputStream:
        if self._is_object_store and isinstance(self._fs, AsyncFileSystem):  # whose files are sent as uploads
            return self._output(name, replaces=True)
        temporary = temporary_name(name)
        return Replacement(self.open_output(temporary), lambda: self._take_place(temporary, name))

    def _take_place(self, temporary: str, name: str) -> None:
        try:
            with self._errors("write", self.location(name), may_be_done=True):
                if not (self._can_move and self._move_into_place(temporary, name, overwrite=True)):
                    self._copy(temporary, name)
        finally:
            self._remove_quietly(temporary)

    def _copy(self, source: str, target: str) -> None:
        """Write one file over another: in place, where the storage can't move files."""
        try:
            self._fs.cp_file(self._key(source), self._key(target))
        except NotImplementedError:
            nbytes = self.file_nbytes(source) or 0
            output = self._output(target, replaces=True)
            for start in range(0, nbytes, self._part_nbytes):
                output.write(self.read(source, start, min(start + self._part_nbytes, nbytes)))
            output.close()

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        check_name(name, path=self.path)
        exists = not (overwrite and self._is_object_store) and self.file_nbytes(name) is not None
        # Only a check: two saves that publish at the very same time both pass it, and if the filesystem has no
        # exclusive mode the later one wins.
        if not overwrite and exists:
            raise already_published(self.location(name))
        if self._is_object_store or not self._can_move:
            self._put(name, data, overwrite=overwrite, tears=exists and not self._is_object_store)
        elif not self._put_by_move(name, data, overwrite=overwrite):
            self._can_move = False  # although the client has a method for it, as SFTP's without posix-rename
            self._put(name, data, overwrite=overwrite, tears=False)

    def _put_by_move(self, name: str, data: bytes, *, overwrite: bool) -> bool:
        """Return False if nothing was done because the storage can't move files at all."""
        temporary = temporary_name(name)
        moved = False
        try:
            with self._errors("write", self.location(name)):
                self._fs.pipe_file(self._key(temporary), data)
            with self._errors("write", self.location(name), may_be_done=True):
                moved = self._move_into_place(temporary, name, overwrite=overwrite)
        finally:
            if not moved:
                self._remove_quietly(temporary)
        return moved

    def _put(self, name: str, data: bytes, *, overwrite: bool, tears: bool) -> None:
        if tears:
            self._warn_of_gap(name)
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

    def _move_into_place(self, temporary: str, name: str, *, overwrite: bool) -> bool:
        """Move a file to its own name; return False if the storage turns out not to move files at all."""
        replaces = overwrite and self._moves.can_replace
        refusal = self._try_to_move(temporary, name, replaces=replaces)
        if refusal is not None and not says_existing(refusal) and (may_mean_existing(refusal) or not self._has_moved):
            refusal = self._try_to_move(temporary, name, replaces=replaces)  # not if it was a hitch
        if refusal is None:
            self._has_moved = True
            return True
        if self.file_nbytes(name) is None:
            if self._has_moved:
                raise refusal
            return False
        if not may_mean_existing(refusal):
            raise refusal
        if not overwrite:
            raise already_published(self.location(name)) from refusal
        if replaces or not (says_existing(refusal) or self._refuses_existing(name, refusal)):
            raise refusal
        self._warn_of_gap(name)
        self._replace_by_moving_aside(temporary, name)
        return True

    def _try_to_move(self, source: str, target: str, *, replaces: bool = False) -> Exception | None:
        """Move a file; return what the client said, which may be nothing, if it is still where it was."""
        refusal: Exception = FileExistsError(errno.EEXIST, f"the storage did not move {source}")
        try:
            move = self._moves.replace if replaces else self._moves.move
            move(self._fs, self._key(source), self._key(target))
        except Exception as error:
            refusal = error
        try:
            return None if self.file_nbytes(source) is None else refusal
        except StorageError as error:
            error.outcome_unknown = True
            raise

    def _refuses_existing(self, name: str, refusal: Exception) -> bool:
        """Try with two other files whether the storage refuses to move a file over an existing one."""
        source, target = temporary_name(name), temporary_name(name)
        try:
            self._fs.pipe_file(self._key(source), b"x")
            if self._try_to_move(source, target) is not None:
                return False
            self._fs.pipe_file(self._key(source), b"x")
            return type(self._try_to_move(source, target)) is type(refusal)
        except Exception as error:
            logger.info("It could not be tried whether files can be replaced: %s", self._redact(str(error)))
            return False
        finally:
            self._remove_quietly(source)
            self._remove_quietly(target)

    def _replace_by_moving_aside(self, temporary: str, name: str) -> None:
        aside = temporary_name(name)
        try:
            with self._errors("write", self.location(name), may_be_done=True):
                for source, target in ((name, aside), (temporary, name)):
                    if refusal := self._try_to_move(source, target):
                        raise refusal
        except BaseException as error:
            if not self._put_back(aside, name):
                advice = (
                    f" If there is no {name} now, its old content is in {aside}, which could not be moved back: rename "
                    f"that to {name}, or, of a checkpoint, run `dcp-nvcomp recover`."
                )
                if not isinstance(error, StorageError):
                    logger.error("%s was not written.%s", self.location(name), advice)
                    raise
                error.message += advice
                error.outcome_unknown = True  # so that nothing is removed which a recovery may need
            raise
        self._remove_quietly(aside)

    def _put_back(self, aside: str, name: str) -> bool:
        """Move a file back, unless there is one after all; return True if there is one now."""
        for _ in range(_PUT_BACK_ATTEMPTS):
            with contextlib.suppress(Exception):
                if self.file_nbytes(name) is not None or self._try_to_move(aside, name) is None:
                    return True
        return False

    def _warn_of_gap(self, name: str) -> None:
        message = (
            f"{self.path} is on a filesystem that can't replace a file in one step. If replacing {name} is "
            "interrupted, there may be none: of a checkpoint, `dcp-nvcomp recover` must then bring back the old one or "
            "the new one; any other file is beside it, under a longer name."
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
            info = self._found(lambda: self._fs.info(key))
            return int(info["size"]) if info is not None and info["type"] == "file" else None

    def _found(self, request: Callable[[], Any]) -> Any:
        """Return what the client finds now; None if what is asked for does not exist."""
        self._fs.invalidate_cache()
        try:
            return request()
        except Exception as error:
            if not is_not_found(error):
                raise
            return None

    def list_files(self) -> list[FileInfo]:
        files = [self._info(item) for item in self._listed() if item["type"] == "file"]
        return sorted((file for file in files if file.name and "/" not in file.name), key=lambda file: file.name)

    def list_folders(self) -> list[str]:
        names = {self._name(item).rstrip("/") for item in self._listed() if item["type"] == "directory"}
        return sorted(name for name in names if name and "/" not in name)

    def _listed(self) -> list[dict[str, Any]]:
        with self._errors("list", self.path), contextlib.suppress(NotADirectoryError):
            return list(self._found(lambda: self._fs.ls(self._root, detail=True)) or ())
        return []

    def _info(self, item: Mapping[str, Any]) -> FileInfo:
        return FileInfo(self._name(item), int(item.get("size") or 0), modified_seconds(item))

    def _name(self, item: Mapping[str, Any]) -> str:
        return str(item["name"]).removeprefix(f"{self._root}/")

    def list_below(self) -> RecursiveListing:
        if not _finds_by_itself(self._fs):
            return self._walked()
        with self._errors("list", self.path):
            found = self._found(lambda: self._fs.find(self._root, detail=True)) or {}
        return RecursiveListing([self._info({**info, "name": path}) for path, info in found.items()], [], {})

    def _walked(self) -> RecursiveListing:
        """Look into one folder after the other: fsspec's own `find` leaves out those that it fails to list."""
        files, failed, folders = list[FileInfo](), dict[str, StorageError](), [self._root]
        while folders:
            folder = folders.pop()
            try:
                with self._errors("list", self.path), contextlib.suppress(NotADirectoryError):
                    for item in self._found(partial(self._fs.ls, folder, detail=True)) or ():
                        name = item["name"].rstrip("/")
                        if item["type"] != "directory":
                            files.append(self._info(item))
                        elif name != folder:  # which some list too
                            folders.append(name)
            except StorageError as error:
                if folder == self._root:
                    raise
                failed[self._name({"name": folder})] = error
        return RecursiveListing(files, [], failed)

    def now_seconds(self) -> float:
        with self._errors("ask for the time", self.path):
            key = f"{self._root}/{clock_name()}"
            self._fs.pipe_file(key, b"")
            try:
                seconds = modified_seconds(self._fs.info(key))
            finally:
                self._fs.rm_file(key)
        if seconds is None:
            raise StorageError("The storage does not report when files were written.", path=self.path)
        return seconds

    def _remove(self, name: str) -> None:
        with self._errors("remove", self.location(name)):
            try:
                self._fs.rm_file(self._key(name))  # not rm(), which expands wildcards and loses errors
            except Exception as error:
                if not is_not_found(error) and not self._is_gone(name):
                    raise

    def _is_gone(self, name: str) -> bool:
        """True if there certainly is no such file: the client of FTP has no error of its own for that."""
        try:
            return self.file_nbytes(name) is None
        except StorageError:
            return False


# What they call the time of the last write, in `info` and `ls`.
_MODIFIED: Final = ("LastModified", "mtime", "modified", "updated", "last_modified", "created", "modify")
_FTP_TIME: Final = re.compile(r"(\d{14})(\.\d+)?")  # as RFC 3659 has it


def modified_seconds(info: Mapping[str, Any]) -> float | None:
    """Return when a file was last written, in seconds since 1970; None if the client does not tell."""
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.replace(tzinfo=value.tzinfo or timezone.utc).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str) and (ftp := _FTP_TIME.fullmatch(value)):
            parsed = datetime.strptime(ftp[1], "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc)
            return parsed.timestamp() + float(ftp[2] or 0)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                parsed = datetime.fromisoformat(value.replace("Z", "+00:00"))
                return parsed.replace(tzinfo=parsed.tzinfo or timezone.utc).timestamp()
    return None
