"""The contract of storage, and the few rules that every implementation shares.

What a storage client raises never leaves these classes: it becomes a `StorageError`, a `TruncatedFileError` or a
`ConfigurationError`. Use it through open.py, which knows the implementations.
"""

from __future__ import annotations

import contextlib
import errno
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from dcp_nvcomp.errors import (
    CheckpointError,
    ConcurrentSaveError,
    FormatError,
    StorageError,
    TruncatedFileError,
    UnsafePathError,
)
from dcp_nvcomp.options import fault_of_name
from dcp_nvcomp.redaction import Redactor

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class FileInfo:
    """A plain file directly in the directory."""

    name: str
    nbytes: int
    # when it was last written, in seconds since 1970 by the storage's clock; None if the storage does not report it
    modified_seconds: float | None
    changed_seconds: float | None = None


@dataclass(frozen=True)
class UnfinishedUpload:
    """A multipart upload that was neither completed nor aborted: an object store keeps its parts until then."""

    name: str  # the file it was to become
    upload_id: str  # what the store calls it
    begun_seconds: float  # when it was begun, in seconds since 1970 by the storage's clock


class RecursiveListing(NamedTuple):
    """What is below a directory, at any depth."""

    files: list[FileInfo]  # all files, each by its relative path
    uploads: list[str]  # relative paths of what unfinished uploads are to become
    failed: dict[str, StorageError]  # why a folder could not be listed, by its relative path


class OutputStream(ABC):
    """One new data file, written front to back by one thread."""

    @abstractmethod
    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`; it may be reused as soon as this returns."""

    @abstractmethod
    def close(self) -> None:
        """Make the file durable and visible. If this raises, call `abort`."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing behind. Never raises; does nothing after a `close` that worked."""

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.abort()


class Filesystem(ABC):
    """One checkpoint's directory. Used by several threads at once; opened in each process, never pickled.

    Names of files are relative to it: `a.distcp`, `folder/a.distcp`; `../folder/a.distcp` is a file of the checkpoint
    beside it that has this name.
    """

    path: str  # as the user gave it, for messages
    parallel_reads: int  # how many concurrent range reads pay off
    read_nbytes: int  # length of a read that pays off: longer ones leave threads without work at the end
    file_nbytes_worthwhile: int  # minimum size that justifies another file's open and fsync
    read_copies: int  # peak number of copies of the data in memory during `read_into`
    # opens another place of the same storage with the same options; set by open.py
    reopen: Callable[[str], Filesystem] | None = None

    @abstractmethod
    def output_streams(self, thread_count: int, memory_budget: int) -> int:
        """Return how many concurrent output streams pay off."""

    def location(self, name: str) -> str:
        """Return the full path of a file of the checkpoint, for messages."""
        path = self.path.rstrip("/")
        parent, slash, _ = path.rpartition("/")
        if name.startswith(BESIDE) and slash:
            return f"{parent}/{name.removeprefix(BESIDE)}"
        return f"{path}/{name}"

    @abstractmethod
    def create_directory(self) -> None:
        """Make the checkpoint's directory and its parents, durably. Does nothing on object stores."""

    def refuse_link(self) -> None:
        """Raise UnsafePathError if the directory itself is a symbolic link: what is written into it lands elsewhere."""
        return

    def remove_directory(self) -> None:
        """Remove the directory if it is empty and the storage has directories; else do nothing."""
        return

    def free_nbytes(self) -> int | None:
        """Return how much can still be written; None if the storage does not tell."""
        return None

    @abstractmethod
    def open_output(self, name: str) -> OutputStream:
        """Begin a data file. Its name is one that was never used before."""

    def open_replacement(self, name: str) -> OutputStream:
        """Begin a file that replaces `name` when it is closed; the old one stays until then, or if it fails."""
        return self.open_output(name)

    @abstractmethod
    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        """Write a small file atomically and durably; ConcurrentSaveError if it exists and `overwrite` is false."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes `start` to `stop` (half-open), or raise TruncatedFileError."""

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill the whole buffer with the bytes from `start` on, or raise TruncatedFileError."""

    @abstractmethod
    def read_all(self, name: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file as it is now, or raise FormatError if it is larger than the limit."""

    @abstractmethod
    def file_nbytes(self, name: str) -> int | None:
        """Return the size of a file as the storage sees it now, or None if there is no such file."""

    @abstractmethod
    def list_files(self) -> list[FileInfo]:
        """Return the plain files directly in the directory, by name; none if there is no directory."""

    def list_folders(self) -> list[str]:
        """Return the sorted names of what is a directory directly in the directory, or looks like one."""
        return []

    @abstractmethod
    def list_below(self) -> RecursiveListing:
        """Return what is at any depth below the directory; nothing if there is no directory."""

    def list_names(self) -> list[str]:
        """Return the sorted names of the plain files directly in the directory; none if there is no directory."""
        return [file.name for file in self.list_files()]

    def list_uploads(self) -> list[UnfinishedUpload]:
        """Return unfinished multipart uploads of files directly in the directory. Only object stores have any."""
        return []

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        """Delete the parts of unfinished uploads; missing ones are fine."""
        assert not list(uploads)

    @abstractmethod
    def now_seconds(self) -> float:
        """Return seconds since 1970 by the clock that `FileInfo.modified_seconds` was taken from."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are fine."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return the result of `function` for each item, as many at once as reads pay off; the first error ends it."""
        items = list(items)
        if len(items) < 2:
            return [function(item) for item in items]
        with ThreadPoolExecutor(self.parallel_reads, "dcp-storage") as pool:
            try:
                results = pool.map(function, items)
            except RuntimeError:  # no thread can be started any more: the interpreter waits for a save before it exits
                results = map(function, items)
            return list(results)

    @abstractmethod
    def close(self) -> None:
        """Drop cached descriptors. The object may be used again afterwards."""


def check_relative_path(name: str, *, path: str) -> str:
    """Return `name` if it stays inside the checkpoint at `path`, else raise UnsafePathError."""
    reason = fault_of_name(name)
    if reason is not None:
        raise UnsafePathError(f"The checkpoint names a file {name!r}, which is not allowed: {reason}.", path=path)
    return name


# What the name of a file begins with that belongs to a checkpoint beside this one, in the same parent directory.
BESIDE: Final = "../"


def check_name(name: str, *, path: str) -> str:
    """Return `name` if it is of a file in the checkpoint at `path`, or in a directory beside it.

    Raises:
        UnsafePathError: it leads elsewhere.
    """
    beside = name.removeprefix(BESIDE)
    if name.startswith(BESIDE) and "/" in beside:
        check_relative_path(beside, path=path)
    else:
        check_relative_path(name, path=path)
    return name


# The errno that clients leave out when they raise one of Python's own subclasses of OSError.
_ERRNO: tuple[tuple[type[OSError], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (FileExistsError, errno.EEXIST),
    (TimeoutError, errno.ETIMEDOUT),
)


# Errors after which it is certain that nothing was done.
REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EEXIST, errno.ENOTDIR),
    *(errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.ENOTSUP, errno.EBUSY, errno.ENOTEMPTY),
)


@contextlib.contextmanager
def storage_errors(
    what: str, path: str, redact: Redactor | None = None, *, may_be_done: bool = False
) -> Iterator[None]:
    """Turn whatever a storage client raises while it tries to do `what` into StorageError."""
    try:
        yield
    except (CheckpointError, MemoryError, AssertionError):
        raise
    except Exception as error:
        redact = redact or _REDACT_URLS
        failure = StorageError.from_os_error(what, path, completed(error), redact=redact)
        failure.outcome_unknown = may_be_done and failure.errno not in REFUSALS
        raise failure from redact.error(error)


_REDACT_URLS = Redactor("", {})

# What clients raise for a missing file that is no OSError: Azure, Google, asyncssh, WebDAV.
_NOT_FOUND = ("ResourceNotFoundError", "NotFound", "SFTPNoSuchFile", "SFTPNoSuchPath", "ResourceNotFound")


def is_not_found(error: Exception) -> bool:
    """True if a client says that a file, or the directory that it is in, does not exist."""
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ENOENT:  # SMB has only the errno
        return True
    if getattr(error, "status", None) == 404 or getattr(error, "status_code", None) == 404:
        return True
    return any(base.__name__ in _NOT_FOUND for base in type(error).__mro__)


def completed(error: Exception) -> Exception:
    """Return the error with its errno, and with the client's words if its own are missing (Ceph sends only codes)."""
    if getattr(error, "errno", None) is None and is_not_found(error) and not isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, f"{type(error).__name__}: {error}")
    if not isinstance(error, OSError) or error.errno is not None:
        return error
    text = str(error.__cause__) if str(error) in ("", "None") and error.__cause__ else str(error)
    return next((known(number, text) for known, number in _ERRNO if isinstance(error, known)), error)


def already_published(path: str) -> ConcurrentSaveError:
    """Return what `publish` raises if it may not replace the file at `path`, and there is one."""
    return ConcurrentSaveError("Another save has already published a checkpoint here.", path=path)


def too_large(path: str, limit_nbytes: int) -> FormatError:
    """Return what `read_all` raises for a file beyond its limit."""
    return FormatError(f"The file is larger than {limit_nbytes} bytes, the most that is read at once.", path=path)


def too_short(path: str, start: int, stop: int, file_nbytes: int) -> TruncatedFileError:
    """Return what range reads raise beyond the end of a file."""
    message = f"The file ends after {file_nbytes} bytes, before the requested range does: it was truncated or replaced."
    return TruncatedFileError(message, path=path, byte_range=(start, stop))


_TEMPORARY: Final = re.compile(r"(.+)\.[0-9a-f]{32}\.tmp", re.DOTALL)
_CLOCK: Final = re.compile(r"\.clock-[0-9a-f]{32}")


def temporary_name(name: str) -> str:
    """Return a new name for a file that is about to be moved to `name`."""
    return f"{name}.{uuid.uuid4().hex}.tmp"


def published_name(temporary: str) -> str | None:
    """Return the name that `temporary_name` was given, None for any other name."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


def clock_name() -> str:
    """Return a new name for a file that is written to learn the storage's time."""
    return f".clock-{uuid.uuid4().hex}"


def is_clock(name: str) -> bool:
    """True for a name made by `clock_name`."""
    return _CLOCK.fullmatch(name) is not None
