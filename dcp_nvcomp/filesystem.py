"""Where a checkpoint's bytes live: `open_filesystem` gives the `Filesystem` for a path or URL.

Local paths use system calls (posix.py); every other URL goes through fsspec, which is imported nowhere else. The
contract that both keep is in filesystem_base.py.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from . import s3
from .errors import ConcurrentSaveError, ConfigurationError, StorageError, TruncatedFileError
from .filesystem_base import (
    FileInfo,
    Filesystem,
    OutputStream,
    UnfinishedUpload,
    check_relative_path,
    storage_errors,
    too_large,
    too_short,
)
from .options import unknown_option
from .posix import PosixFilesystem

__all__ = ["FileInfo", "Filesystem", "OutputStream", "UnfinishedUpload", "check_relative_path", "open_filesystem"]

logger = logging.getLogger(__name__)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(::.*)?://", re.DOTALL)


def open_filesystem(
    path: str | os.PathLike[str],
    *,
    sync_files: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    known_options: Sequence[str] = (),
) -> Filesystem:
    """Open the place of one checkpoint; nothing is read or written yet.

    Args:
        path: a local path, or any URL that fsspec knows.
        sync_files: fsync local data files when they are closed.
        storage_options: for the fsspec filesystem, as they are; never changed.
        known_options: names of the options that the caller itself takes, to tell a typing error by.

    Raises:
        ConfigurationError: an option or the protocol is unknown, or its package is not installed.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"A checkpoint's path is a non-empty str or Path, not {path!r}.")
    options = dict(storage_options or {})
    url = _URL.match(text)
    protocol = url[1].lower() if url else "file"
    chained = url is not None and url[2] is not None
    _check_options(_filesystem_class(protocol, text), protocol, options, known_options, may_pass=chained)
    if protocol in ("file", "local") and not chained:
        local = os.path.expanduser(text[url.end() :] if url else text)
        return PosixFilesystem(text, os.path.abspath(local), sync_files=sync_files)
    return FsspecFilesystem(text, protocol, options)


def _filesystem_class(protocol: str, path: str) -> type:
    try:
        found: type = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = "'dcp-nvcomp[s3]'" if protocol in ("s3", "s3a") else f"the package fsspec needs for it ({error})"
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
    names = set(_COMMON_OPTIONS + (_S3_SESSION_OPTIONS if protocol in ("s3", "s3a") else ()))
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

_PARALLEL_READS = 16
_MIN_PART_NBYTES = 5 << 20  # S3's own limit
_PART_NBYTES = 16 << 20
_PARALLEL_WRITES = 4
_PARTS_BEFORE_GROWTH = 2000  # S3 takes 10,000 parts: with this growth nearly 1 TiB


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


class FsspecFilesystem(Filesystem):
    """Object stores, and whatever else fsspec reaches.

    Files are published by one PUT (`pipe_file`). That is atomic on object stores; on other remote filesystems it is
    as atomic as their fsspec implementation makes it.
    """

    parallel_reads = _PARALLEL_READS
    read_copies = 3  # as the client received it, joined, and where it is wanted
    file_nbytes_worthwhile = 64 << 20

    def __init__(self, path: str, protocol: str, options: Mapping[str, Any]) -> None:
        self.path = path
        self._makes_directories = protocol not in _OBJECT_STORES
        self._is_s3 = protocol in ("s3", "s3a")
        options = {"use_listings_cache": False, **options}  # a stale listing hides new files and shows removed ones
        if protocol in ("s3", "s3a"):
            pool = {"max_pool_connections": 2 * _PARALLEL_READS}  # botocore's 10 would queue our parallel reads
            options["config_kwargs"] = {**pool, **(options.get("config_kwargs") or {})}
        self._part_nbytes = options.get("default_block_size") or _PART_NBYTES
        self._parts_grow = not options.get("fixed_upload_size")
        if self._part_nbytes < _MIN_PART_NBYTES:
            raise ConfigurationError(f"default_block_size must be at least {_MIN_PART_NBYTES}, S3's smallest part.")
        try:
            self._fs, root = fsspec.url_to_fs(path, **options)
            if protocol in ("s3", "s3a") and not options.get("asynchronous"):
                self._fs.connect()  # no request yet, but wrong client options show here
                s3.check_additional_kwargs(self._fs)
                s3.drop_expect_header(self._fs)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"These storage options do not work: {error}.", path=path) from error
        self._root = root.rstrip("/")

    def output_streams(self, thread_count: int, memory_budget: int) -> int:
        # a stream waits for one part at a time, however many threads made it, and holds it up to five times meanwhile
        return max(1, min(_PARALLEL_WRITES, memory_budget // (5 * self._part_nbytes)))

    def _key(self, name: str) -> str:
        return f"{self._root}/{check_relative_path(name, path=self.path)}"

    def create_directory(self) -> None:
        if self._makes_directories:
            with storage_errors("create the directory", self.path):
                self._fs.makedirs(self._root, exist_ok=True)

    def open_output(self, name: str) -> OutputStream:
        return _FsspecOutput(self._fs, self._key(name), self.location(name), self._part_nbytes, self._parts_grow)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        if overwrite:
            self._put(name, data)
        else:
            self._put_new(name, data)

    def _put(self, name: str, data: bytes) -> None:
        with storage_errors("write", self.location(name)):
            self._fs.pipe_file(self._key(name), data)

    def _put_new(self, name: str, data: bytes) -> None:
        # Only a check: two saves that publish at the very same time both pass it, and the later one stays.
        if self.file_nbytes(name) is not None:
            raise ConcurrentSaveError("Another save has published here already.", path=self.location(name))
        self._put(name, data)

    def read(self, name: str, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop
        if start == stop:
            return b""
        data = self._get(name, start, stop)
        if len(data) < stop - start:
            raise too_short(self.location(name), start, stop, start + len(data))
        return data

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        target = buffer.cast("B")
        target[:] = self.read(name, start, start + len(target))

    def read_all(self, name: str, *, limit_nbytes: int) -> bytes:
        # One request, so that a file that is replaced meanwhile is never mixed from two versions.
        try:
            data = self._get(name, 0, limit_nbytes + 1)
        except TruncatedFileError:  # no byte at all: an empty file has no range
            return b""
        if len(data) > limit_nbytes:
            raise too_large(self.location(name), limit_nbytes)
        return data

    def _get(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a non-empty range that begins inside the file, cut off at its end."""
        try:
            with storage_errors("read", self.location(name)):
                data: bytes = self._fs.cat_file(self._key(name), start=start, end=stop)
        except StorageError as error:
            if error.errno == errno.EINVAL:  # what s3fs makes of "416 range not satisfiable", among others
                nbytes = self.file_nbytes(name)
                if nbytes is not None and nbytes <= start:
                    raise too_short(self.location(name), start, stop, nbytes) from error
            raise
        if len(data) > stop - start:
            raise StorageError("The storage sent more bytes than the range has.", path=self.location(name))
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
            FileInfo(item["name"].removeprefix(f"{self._root}/"), int(item["size"]), _modified_seconds(item))
            for item in found
            if item["type"] == "file"
        ]
        return sorted((file for file in inside if file.name and "/" not in file.name), key=lambda file: file.name)

    def list_uploads(self) -> list[UnfinishedUpload]:
        if not self._is_s3:
            return []
        with storage_errors("list unfinished uploads of", self.path):
            return s3.list_uploads(self._fs, self._root)

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        for upload in uploads:
            with storage_errors("abort an unfinished upload of", self.location(upload.name)):
                s3.abort_upload(self._fs, self._key(upload.name), upload.upload_id)

    def now_seconds(self) -> float:
        with storage_errors("ask for the time", self.path):
            if self._is_s3:
                return s3.now_seconds(self._fs, self._root)
            key = f"{self._root}/.clock-{uuid.uuid4().hex}"
            self._fs.pipe_file(key, b"")
            try:
                seconds = _modified_seconds(self._fs.info(key))
            finally:
                self._fs.rm_file(key)
        if seconds is None:
            raise StorageError("The storage does not tell when files were written.", path=self.path)
        return seconds

    def remove(self, names: Iterable[str]) -> None:
        keys = {self.location(name): self._key(name) for name in names}

        def remove_one(where: str) -> None:
            with storage_errors("remove", where), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(keys[where])  # not rm(), which expands wildcards and loses errors

        with ThreadPoolExecutor(self.parallel_reads) as pool:
            list(pool.map(remove_one, keys))

    def close(self) -> None:
        pass  # fsspec shares one client among all users of the same options, and closes it when the process ends


class _FsspecOutput(OutputStream):
    def __init__(self, fs: Any, key: str, location: str, part_nbytes: int, parts_grow: bool) -> None:
        self._fs, self._key, self._location = fs, key, location
        self._state = "open"  # then "broken", "closed" or "aborted"
        self._part_nbytes, self._parts_grow = part_nbytes, parts_grow
        self._part_left = part_nbytes
        self._part_count = 0
        with storage_errors("create", location):
            self._file = fs.open(key, "wb", block_size=part_nbytes)

    def write(self, data: memoryview | bytes) -> None:
        assert self._state == "open"
        view = memoryview(data).cast("B")
        with self._broken_unless_done("write"):
            while view:
                taken = view[: self._part_left]  # or s3fs would send a large write as one large part
                self._file.write(taken)
                view = view[len(taken) :]
                self._part_left -= len(taken)
                if not self._part_left:
                    self._begin_part()

    def _begin_part(self) -> None:
        self._part_count += 1
        if self._parts_grow and self._part_count % _PARTS_BEFORE_GROWTH == 0:
            self._part_nbytes *= 2
            self._file.blocksize = self._part_nbytes
        self._part_left = self._part_nbytes

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
