"""Find how a filesystem of fsspec moves one file over another: names of methods, and what fsspec itself lacks."""

from __future__ import annotations

import errno
from typing import Any, Final

from fsspec.spec import AbstractFileSystem

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
