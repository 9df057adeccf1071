"""A data file on a local disk while it is written, and the system calls by which files and names become durable."""

from __future__ import annotations

import contextlib
import errno
import os

from dcp_nvcomp.storage.base import OutputStream, storage_errors


def create_file(path: str) -> int:
    """A descriptor of a new file: no save ever writes into another one's, nor through a symbolic link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: memoryview | bytes) -> None:
    """Write all of it: `os.write` may do less."""
    view = memoryview(data).cast("B")
    while view:
        count = os.write(descriptor, view)  # a signal or a nearly full disk makes it short
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        view = view[count:]


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems can't, and need not
            raise
    finally:
        os.close(descriptor)


class PosixOutput(OutputStream):
    """One new data file."""

    def __init__(self, full: str, location: str, *, sync_files: bool) -> None:
        self._full, self._location, self._sync_files = full, location, sync_files
        with storage_errors("create", location):
            self._descriptor: int | None = create_file(full)
        self._closed = False

    def write(self, data: memoryview | bytes) -> None:
        assert self._descriptor is not None
        with storage_errors("write", self._location):
            write_all(self._descriptor, data)

    def close(self) -> None:
        assert self._descriptor is not None
        with storage_errors("write", self._location):
            try:
                if self._sync_files:
                    os.fsync(self._descriptor)
            finally:
                descriptor, self._descriptor = self._descriptor, None
                os.close(descriptor)
            self._finish()
            if self._sync_files:
                sync_directory(os.path.dirname(self._full))
        self._closed = True

    def _finish(self) -> None:
        """Give the file its name, once its bytes are durable."""

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(self._full)


class PosixReplacement(PosixOutput):
    """A file that is renamed over another one once it is durable."""

    def __init__(self, final: str, temporary: str, location: str, *, sync_files: bool) -> None:
        super().__init__(temporary, location, sync_files=sync_files)
        self._final = final

    def _finish(self) -> None:
        os.rename(self._full, self._final)
