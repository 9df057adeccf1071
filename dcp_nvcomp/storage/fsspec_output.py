"""Files that are written to a filesystem of fsspec's, and how it moves one over another."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from typing import Any, Final

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import OutputStream, is_not_found, storage_errors
from dcp_nvcomp.storage.remote import RemoteOutput

logger = logging.getLogger(__name__)


class FsspecOutput(RemoteOutput):
    """An output stream whose file appears when it is closed, if the client can do that.

    The client has each write at once: it may send it while the next one is encoded.
    """

    def __init__(
        self,
        fs: Any,
        key: str,
        location: str,
        part_nbytes: int,
        redact: Redactor,
        *,
        replaces: bool = False,
        turn: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(location, replaces=replaces)
        self._fs, self._key, self._redact = fs, key, redact
        self._turn = turn or contextlib.nullcontext()
        with self._turn, storage_errors("create", location, redact):
            self._file = fs.open(key, "wb", block_size=part_nbytes)

    def _accept(self, data: memoryview) -> None:
        with self._turn, storage_errors("write", self._where, self._redact):
            self._file.write(data)

    def _finish(self) -> None:
        self._may_exist = True
        with self._turn, storage_errors("write", self._where, self._redact):
            self._file.close()

    def _discard(self) -> None:
        with self._turn:
            try:
                if not self._discard_upload():
                    if self._replaces:  # closing would put what there is of it in the older one's place
                        self._file.closed = True
                        return
                    self._may_exist = True
                    self._file.close()
            except Exception as error:
                self._warn("an unfinished upload", error)
            if self._may_exist and not self._replaces:  # a close that failed may have taken effect nevertheless
                try:
                    self._fs.rm_file(self._key)
                except Exception as error:
                    if not is_not_found(error):
                        self._warn("it", error)

    def _warn(self, what: str, error: Exception) -> None:
        logger.warning("Could not discard %s, %s may be left: %s", self._where, what, self._redact(str(error)))

    def _discard_upload(self) -> bool:
        """Discard what was uploaded so far; return False if this kind of file can't."""
        if not isinstance(self._file, AbstractBufferedFile) or type(self._file).discard is AbstractBufferedFile.discard:
            return False
        self._file.closed = True  # its close() and __del__ would commit the truncated file
        self._file.discard()
        return True

    def __del__(self) -> None:
        # Dropped without close or abort. Commit nothing; and send no requests here: the loop may be closed.
        file = getattr(self, "_file", None)
        if self._state in ("open", "broken") and isinstance(file, AbstractBufferedFile):
            file.closed = True


class Replacement(OutputStream):
    """A file that is written under a temporary name and takes the place of another one when it is complete."""

    def __init__(self, written: OutputStream, take_place: Callable[[], None]) -> None:
        self._written, self._take_place = written, take_place

    def write(self, data: memoryview | bytes) -> None:
        self._written.write(data)

    def close(self) -> None:
        self._written.close()
        self._take_place()

    def abort(self) -> None:
        self._written.abort()


# Replace an existing target by their name; `rename` and `mv` may replace it or refuse to.
_REPLACING: Final = ("posix_rename", "replace")
_MOVING: Final = ("mv", "rename", "move")
# Their `mv` replaces an existing target: it is SFTP's posix-rename.
_MV_REPLACES: Final = ("fsspec.implementations.sftp",)


class Moves:
    """Which ways of moving a file a filesystem has.

    fsspec's own `mv` copies the file and removes the original, so it counts for nothing. In a chain (`dir::`,
    `simplecache::`) a method counts if the outermost filesystem hands it on, and the innermost one has it.
    """

    def __init__(self, fs: Any) -> None:
        self._replacing = next((name for name in _REPLACING if callable(getattr(fs, name, None))), None)
        self._moving = next((name for name in _MOVING if _owner(fs, name) is not None), None)
        if self._replacing is None and any(base.__module__ in _MV_REPLACES for base in type(_owner(fs, "mv")).__mro__):
            self._replacing = "mv"

    @property
    def can_replace(self) -> bool:
        """True if there is a move that replaces an existing file in one step."""
        return self._replacing is not None

    @property
    def can_move(self) -> bool:
        """True if files can be moved at all, without being copied."""
        return self.can_replace or self._moving is not None

    def replace(self, fs: Any, source: str, target: str) -> None:
        """Move `source` over `target`, which may exist. Only if `can_replace`."""
        assert self._replacing is not None
        getattr(fs, self._replacing)(source, target)

    def move(self, fs: Any, source: str, target: str) -> None:
        """Move `source` to `target`; if that exists it may be replaced, or this may fail. Only if `can_move`."""
        if self._moving is None:
            self.replace(fs, source, target)
        else:
            getattr(fs, self._moving)(source, target)


def _owner(fs: Any, name: str) -> Any:
    """Return the filesystem of a chain whose own method is called in the end; None if fsspec copies and removes."""
    method = getattr(fs, name, None)
    if not callable(method):
        return None
    if getattr(method, "__func__", method) is getattr(AbstractFileSystem, name):
        return None if name == "mv" else _owner(fs, "mv")  # `rename` and `move` of fsspec call `mv`
    bound_to = getattr(method, "__self__", fs)
    if bound_to is not fs and isinstance(bound_to, AbstractFileSystem):  # the caching ones hand out the inner method
        return _owner(bound_to, name)
    inner = getattr(fs, "fs", None) or getattr(fs, "sync_fs", None)
    return _owner(inner, name) if isinstance(inner, AbstractFileSystem) else fs


def says_existing(error: Exception) -> bool:
    """True if a client certainly refuses a move because the target exists."""
    return isinstance(error, FileExistsError) or getattr(error, "errno", None) == errno.EEXIST


def may_mean_existing(error: Exception) -> bool:
    """True if a client may mean that the target exists: many have no errno for it, or for anything."""
    return says_existing(error) or getattr(error, "errno", None) in (None, 0)
