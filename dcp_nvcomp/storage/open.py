"""Where a checkpoint's bytes live: `open_filesystem` gives the `Filesystem` for a path or URL.

Local paths use system calls (local/filesystem.py); every other URL goes through fsspec, which is imported nowhere else.
The contract that both keep is in base.py.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import inspect
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from dcp_nvcomp.errors import ConcurrentSaveError, ConfigurationError, StorageError
from dcp_nvcomp.options import DEADLINE_OPTION, DEADLINE_SECONDS, check_seconds, unknown_option
from dcp_nvcomp.storage.base import (
    FileInfo,
    Filesystem,
    OutputStream,
    UnfinishedUpload,
    check_relative_path,
    storage_errors,
    too_short,
)
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.remote import PARALLEL_READS, RemoteFilesystem, part_nbytes
from dcp_nvcomp.storage.s3 import client as s3_client
from dcp_nvcomp.storage.s3 import filesystem as s3

__all__ = ["FileInfo", "Filesystem", "OutputStream", "UnfinishedUpload", "check_relative_path", "open_filesystem"]

logger = logging.getLogger(__name__)

_S3 = ("s3", "s3a")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(::.*)?://", re.DOTALL)


def open_filesystem(
    path: str | os.PathLike[str],
    *,
    sync_files: bool = True,
    deadline_seconds: float = DEADLINE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    known_options: Sequence[str] = (),
) -> Filesystem:
    """Open the place of one checkpoint; nothing is read or written yet.

    Args:
        path: a local path, or any URL that fsspec knows.
        sync_files: fsync local data files when they are closed.
        deadline_seconds: on S3, how long one operation may take with all its retries.
        storage_options: for the fsspec filesystem, as they are; never changed. `storage_deadline_seconds` among them
            counts instead of `deadline_seconds`: so the commands take it.
        known_options: names of the options that the caller itself takes, to tell a typing error by.

    Raises:
        ConfigurationError: an option or the protocol is unknown, or its package is not installed.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"A checkpoint's path is a non-empty str or Path, not {path!r}.")
    options = dict(storage_options or {})
    deadline_seconds = check_seconds(DEADLINE_OPTION, options.pop(DEADLINE_OPTION, deadline_seconds))
    url = _URL.match(text)
    protocol = url[1].lower() if url else "file"
    chained = url is not None and url[2] is not None
    _check_options(_filesystem_class(protocol, text), protocol, options, known_options, may_pass=chained)
    if protocol in ("file", "local") and not chained:
        local = os.path.expanduser(text[url.end() :] if url else text)
        return PosixFilesystem(text, os.path.abspath(local), sync_files=sync_files)
    if protocol in _S3 and not chained:
        return _open_s3(text, options, deadline_seconds)
    return _open_fsspec(text, protocol, options)


def _open_s3(path: str, options: dict[str, Any], deadline_seconds: float) -> Filesystem:
    pool = {"max_pool_connections": 2 * PARALLEL_READS}  # botocore's 10 would queue our parallel reads
    config = s3_client.client_options({**pool, **(options.get("config_kwargs") or {})})
    nbytes = part_nbytes(options)
    with _configuration_errors(path):
        fs, root = fsspec.url_to_fs(path, **{"use_listings_cache": False, **options, "config_kwargs": config})
        fs.connect()  # no request yet, but wrong client options show here
        s3.check_additional_kwargs(fs)
        s3.drop_expect_header(fs)
    grow = not options.get("fixed_upload_size")
    return s3.S3Filesystem(path, fs, root, part_nbytes=nbytes, parts_grow=grow, deadline_seconds=deadline_seconds)


def _open_fsspec(path: str, protocol: str, options: dict[str, Any]) -> Filesystem:
    nbytes = part_nbytes(options)
    with _configuration_errors(path):
        # a stale listing hides new files and shows removed ones
        fs, root = fsspec.url_to_fs(path, **{"use_listings_cache": False, **options})
    return FsspecFilesystem(path, fs, root, part_nbytes=nbytes, makes_directories=protocol not in _OBJECT_STORES)


@contextlib.contextmanager
def _configuration_errors(path: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"These storage options do not work: {error}.", path=path) from error


def _filesystem_class(protocol: str, path: str) -> type:
    try:
        found: type = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = "'dcp-nvcomp[s3]'" if protocol in _S3 else f"the package fsspec needs for it ({error})"
        raise ConfigurationError(f"{protocol}:// is not available here: pip install {package}.", path=path) from error
    except ValueError as error:
        raise ConfigurationError(f"No storage is known by the name of {protocol}://.", path=path) from error
    return found


# Taken by every fsspec filesystem, but not named in its constructor.
_COMMON_OPTIONS = ("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache")
# s3fs hands what it does not know to its botocore session, which names it only at the first request.
_S3_SESSION_OPTIONS = ("profile", "session_vars", "event_hooks", "include_builtin_handlers")
# Filesystems whose options are all named above or in their constructors: anything else is a mistake.
_CLOSED = ("file", "local", "memory", "s3", "s3a")


def _check_options(
    filesystem_class: type, protocol: str, options: Mapping[str, Any], known_options: Sequence[str], *, may_pass: bool
) -> None:
    """Refuse options that nobody takes: fsspec and s3fs would swallow them, or fail late and unclearly."""
    names = set(_COMMON_OPTIONS + (_S3_SESSION_OPTIONS if protocol in _S3 else ()))
    for base in filesystem_class.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
    for option in options.keys() - names:
        close = difflib.get_close_matches(option, [*known_options, *sorted(names)], n=1, cutoff=0.75)
        if close or (protocol in _CLOSED and not may_pass):
            raise unknown_option(option, close, f"{protocol}:// takes {', '.join(sorted(names))}")


# A PUT is atomic and directories do not exist. Elsewhere directories are made, as on a disk.
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "ocilake", "oss", "memory")

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
