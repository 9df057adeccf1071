"""Local paths, by system calls: what the durability promises of POSIX need, and fsspec's local files do not do.

A file is durable once it was fsynced, a name once its directory was, and that one's name once the directory above it
was. Data files are created exclusively. A small file is published as a temporary in the same directory, fsynced, and
then renamed (or linked, if it must not replace another).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dcp_nvcomp.errors import StorageError, UnsafePathError
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import (
    BESIDE,
    FileInfo,
    Filesystem,
    OutputStream,
    RecursiveListing,
    already_published,
    check_name,
    storage_errors,
    temporary_name,
    too_large,
    too_short,
)
from dcp_nvcomp.storage.local.output import PosixOutput, PosixReplacement, create_file, sync_directory, write_all

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_OPEN_FILES = 64
# A directory above that can't be synced, by this user or here: someone else made it.
_UNSYNCED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSYS, errno.EBADF, errno.EINVAL, errno.ENOTSUP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_MAX_READ_NBYTES = 1 << 30  # Linux gives at most 2 GiB a call
_LEAST_READ_NBYTES = 1 << 12


class _Descriptor:
    """An open file. Threads that still read keep it open after it left the cache."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        _close_quietly(self.number)


def _close_quietly(descriptor: int) -> None:
    """Close what was only read from: Linux releases a descriptor even if it reports an error."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _open_inside(root: str, name: str) -> int:
    """Open a file of the checkpoint for reading, following no symbolic link below the checkpoint's directory."""
    *folders, last = name.split("/")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            _close_quietly(folder)
            folder = inner
        # O_NONBLOCK: opening a FIFO must not wait for a writer
        return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        _close_quietly(folder)  # an error here would lose the descriptor that is being returned


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except FileNotFoundError:
        return False


def _remove_temporary(path: str) -> None:
    """Remove it unless it was renamed: a failure harms nothing, so it must not hide what became of the publishing."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("The temporary file %s could not be removed: %s", path, error)


def _info(item: os.DirEntry[str]) -> FileInfo | None:
    try:
        found = item.stat(follow_symlinks=False)
    except FileNotFoundError:  # removed since it was listed
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return FileInfo(item.name, found.st_size, found.st_mtime, found.st_ctime)


class PosixFilesystem(Filesystem):
    """A directory on a local or mounted disk.

    Range reads of one name see the file that was there at the first of them until `close`; `read_all` and
    `file_nbytes` look at the file as it is then.
    """

    parallel_reads = 2
    read_nbytes = 4 << 20  # at 8 MiB a load of 100 MB takes a tenth longer
    read_copies = 1
    file_nbytes_worthwhile = 64 << 20

    def __init__(self, path: str, root: str, *, sync_files: bool = True, directory_mode: int = 0o777) -> None:
        self.path = without_secrets(path)
        self._root = root
        self._sync_files, self._directory_mode = sync_files, directory_mode
        self._parents_synced = False
        self._lock = threading.Lock()
        self._descriptors: OrderedDict[str, _Descriptor] = OrderedDict()

    def output_streams(self, thread_count: int, memory_budget: int) -> int:
        return min(2, thread_count)

    def _place(self, name: str) -> tuple[str, str]:
        """Return the directory that a file is in or below, and its name there."""
        name = check_name(name, path=self.path)
        if name.startswith(BESIDE):
            return os.path.dirname(os.path.realpath(self._root)), name.removeprefix(BESIDE)
        return self._root, name

    def _full(self, name: str) -> str:
        return os.path.join(*self._place(name))

    def create_directory(self) -> None:
        with storage_errors("create the directory", self.path):
            os.makedirs(self._root, self._directory_mode, exist_ok=True)

    def refuse_link(self) -> None:
        if os.path.islink(self._root):
            raise UnsafePathError(
                f"This is a symbolic link to {os.path.realpath(self._root)!r}. A run changes nothing outside of its "
                "own directories: move that one here, or remove the link.",
                path=self.path,
            )

    def remove_directory(self) -> None:
        with storage_errors("remove the directory", self.path):
            try:
                os.rmdir(self._root)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EBUSY):
                    raise

    def free_nbytes(self) -> int | None:
        existing = self._root
        while not os.path.isdir(existing):
            existing = os.path.dirname(existing)
        with storage_errors("look up the free space", self.path):
            found = os.statvfs(existing)
        return found.f_bavail * found.f_frsize

    def _sync_parents(self) -> None:
        """Make the directory's own name durable, and those above it, which may be new too."""
        if self._parents_synced or not self._sync_files:
            return
        device, path = os.stat(self._root).st_dev, self._root
        while (parent := os.path.dirname(path)) != path and os.stat(parent).st_dev == device:
            try:
                sync_directory(parent)
            except OSError as error:
                if error.errno not in _UNSYNCED:
                    raise
            path = parent
        self._parents_synced = True

    def open_output(self, name: str) -> OutputStream:
        return PosixOutput(self._full(name), self.location(name), sync_files=self._sync_files)

    def open_replacement(self, name: str) -> OutputStream:
        final = self._full(name)
        with storage_errors("write", self.location(name)):
            self._sync_parents()
        return PosixReplacement(final, temporary_name(final), self.location(name), sync_files=self._sync_files)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        final = self._full(name)
        temporary = temporary_name(final)
        try:
            with storage_errors("write", self.location(name)):
                self._write_temporary(temporary, data)
                self._sync_parents()
            # on a network file system what failed here may be done all the same
            with storage_errors("write", self.location(name), may_be_done=True):
                if overwrite:
                    os.rename(temporary, final)
                else:
                    self._link_new(temporary, final, name)
        finally:
            _remove_temporary(temporary)
        with storage_errors("write", self.location(name), may_be_done=True):
            sync_directory(os.path.dirname(final))

    def _write_temporary(self, temporary: str, data: bytes) -> None:
        descriptor = create_file(temporary)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _link_new(self, temporary: str, final: str, name: str) -> None:
        try:
            os.link(temporary, final)
        except FileExistsError as error:
            if _same_file(temporary, final):  # a network filesystem asked twice, as the first reply was lost
                return
            raise already_published(self.location(name)) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._rename_new(temporary, final, name)

    def _rename_new(self, temporary: str, final: str, name: str) -> None:
        """As near as it gets on a filesystem without hard links (FAT, some FUSE)."""
        message = (
            f"{self.path} is on a filesystem without hard links, so overwrite=False is only a check there: of two "
            "saves that publish at the very same time, the later one wins."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        if os.path.lexists(final):
            raise already_published(self.location(name))
        os.rename(temporary, final)

    def read(self, name: str, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop
        if start == stop:
            return b""
        descriptor = self._descriptor(name)
        with storage_errors("read", self.location(name)):
            nbytes = os.fstat(descriptor.number).st_size
        if stop > nbytes:  # before memory is taken for a size that only the file's footer claims
            raise too_short(self.location(name), start, stop, nbytes)
        data = b""
        while len(data) < stop - start:
            position = start + len(data)
            with storage_errors("read", self.location(name)):
                part = os.pread(descriptor.number, min(stop - position, _MAX_READ_NBYTES), position)
            if not part:
                raise too_short(self.location(name), start, stop, position)
            data = data + part if data else part  # usually there is only one part
        return data

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        target = buffer.cast("B")
        position, stop = start, start + len(target)
        while position < stop:
            descriptor = self._descriptor(name)
            with storage_errors("read", self.location(name)):
                done = os.preadv(descriptor.number, [target[position - start :][:_MAX_READ_NBYTES]], position)
            if not done:
                raise too_short(self.location(name), start, stop, position)
            position += done

    def _descriptor(self, name: str) -> _Descriptor:
        with self._lock:
            found = self._descriptors.get(name)
            if found is None:
                found = self._descriptors[name] = self._open(name)
                if len(self._descriptors) > _MAX_OPEN_FILES:
                    self._descriptors.popitem(last=False)
            else:
                self._descriptors.move_to_end(name)
            return found

    def _open(self, name: str) -> _Descriptor:
        place = self._place(name)
        with storage_errors("read", self.location(name)), self._links_refused(name):
            descriptor = _Descriptor(_open_inside(*place))
            if not stat.S_ISREG(os.fstat(descriptor.number).st_mode):
                raise StorageError("This is not a plain file.", path=self.location(name), errno=errno.EINVAL)
            return descriptor

    @contextlib.contextmanager
    def _links_refused(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # an inner link shows as ENOTDIR, because of O_DIRECTORY
            if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and self._has_link(name)):
                message = "Symbolic links inside a checkpoint are not followed: they may lead out of it."
                raise UnsafePathError(message, path=self.location(name)) from error
            raise

    def _has_link(self, name: str) -> bool:
        root, inside = self._place(name)
        parts = inside.split("/")
        return any(os.path.islink(os.path.join(root, *parts[:count])) for count in range(1, len(parts) + 1))

    def read_all(self, name: str, *, limit_nbytes: int) -> bytes:
        descriptor = self._open(name)
        parts, done = list[bytes](), 0
        with storage_errors("read", self.location(name)):
            nbytes = os.fstat(descriptor.number).st_size
            # as much as it has and a byte more, which shows that it grew; in one part, so that nothing is copied
            while done <= limit_nbytes and nbytes <= limit_nbytes:
                wanted = min(max(nbytes - done, _LEAST_READ_NBYTES) + 1, limit_nbytes + 1 - done, _MAX_READ_NBYTES)
                part = os.pread(descriptor.number, wanted, done)
                if not part:
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                parts.append(part)
                done += len(part)
        raise too_large(self.location(name), limit_nbytes)

    def file_nbytes(self, name: str) -> int | None:
        full = self._full(name)
        with storage_errors("look up", self.location(name)):
            try:
                with self._links_refused(name):
                    if self._has_link(name):
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    found = os.stat(full, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list_files(self) -> list[FileInfo]:
        found = self._listed(_info)
        return sorted((file for file in found if file is not None), key=lambda file: file.name)

    def _listed(self, what: Callable[[os.DirEntry[str]], T]) -> list[T]:
        with storage_errors("list", self.path):
            try:
                with os.scandir(self._root) as items:
                    return [what(item) for item in items]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list_folders(self) -> list[str]:
        return sorted(name for name, is_folder in self._listed(lambda item: (item.name, item.is_dir())) if is_folder)

    def list_below(self) -> RecursiveListing:
        failed: dict[str, StorageError] = {}

        def fail(error: OSError) -> None:
            if isinstance(error, FileNotFoundError | NotADirectoryError):  # there is none, or it was removed since
                return
            folder = os.path.relpath(error.filename or self._root, self._root)
            if folder == ".":
                raise error
            failed[folder] = StorageError.from_os_error("list", self.location(folder), error)

        with storage_errors("list", self.path):
            found = []
            for folder, _, names in os.walk(self._root, onerror=fail):
                for name in names:
                    full = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        status = os.lstat(full)
                        relative = os.path.relpath(full, self._root)
                        found.append(FileInfo(relative, status.st_size, status.st_mtime, status.st_ctime))
        return RecursiveListing(found, [], failed)

    def now_seconds(self) -> float:
        # a network file system stamps files by the server's clock: so ask it for a stamp
        with storage_errors("write", self.path):
            try:
                with tempfile.TemporaryFile(dir=self._root) as file:
                    return os.fstat(file.fileno()).st_mtime
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):  # no inode is left, which `clean` is to change
                    os.utime(self._root)
                    return os.stat(self._root).st_mtime
                if error.errno not in (errno.EROFS, errno.EACCES):
                    raise
                return time.time()  # nothing depends on the clock of a reader that may not write

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            full = self._full(name)
            missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
            with storage_errors("remove", self.location(name)), missing:
                os.unlink(full)

    def close(self) -> None:
        with self._lock:
            self._descriptors.clear()
