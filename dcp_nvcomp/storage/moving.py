"""Find how a filesystem of fsspec moves one file over another: names of methods, and what fsspec itself lacks."""

from __future__ import annotations

import time
from typing import Any, Final

from fsspec.spec import AbstractFileSystem

__all__ = ["Moves"]

# Replace an existing target by their name; `rename` and `mv` may replace it or refuse to.
_REPLACING: Final = ("posix_rename", "replace")
_MOVING: Final = ("mv", "rename", "move")
_SMB: Final = "fsspec.implementations.smb"
# Windows and Samba refuse to replace a file that a reader holds open: "sharing violation", "access denied".
_SMB_HELD_OPEN: Final = (0xC0000043, 0xC0000022)
_SMB_PAUSES_SECONDS: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 0.0)


class Moves:
    """Which ways of moving a file a filesystem has.

    fsspec's own `mv` copies the file and removes the original, so it counts for nothing; a chained filesystem
    (`dir::`, `simplecache::`) has what the innermost one has.

    Args:
        fs: the filesystem.
    """

    def __init__(self, fs: Any) -> None:
        inner = _innermost(fs)
        self._is_smb = type(fs).__module__ == _SMB
        self._replacing = next((name for name in _REPLACING if callable(getattr(fs, name, None))), None)
        self._moving = next((name for name in _MOVING if _is_own(inner, name)), None)

    @property
    def can_replace(self) -> bool:
        """True if there is a move that replaces an existing file in one step."""
        return self._is_smb or self._replacing is not None

    @property
    def can_move(self) -> bool:
        """True if files can be moved at all, without being copied."""
        return self.can_replace or self._moving is not None

    def replace(self, fs: Any, source: str, target: str) -> None:
        """Move `source` over `target`, which may exist. Only if `can_replace`."""
        if self._is_smb:
            _replace_on_smb(fs, source, target)
        else:
            assert self._replacing is not None
            getattr(fs, self._replacing)(source, target)

    def move(self, fs: Any, source: str, target: str) -> None:
        """Move `source` to `target`; if that exists it may be replaced, or this may fail. Only if `can_move`."""
        if self._moving is None:
            self.replace(fs, source, target)
        else:
            getattr(fs, self._moving)(source, target)


def _innermost(fs: Any) -> Any:
    while isinstance(inner := getattr(fs, "fs", None) or getattr(fs, "sync_fs", None), AbstractFileSystem):
        fs = inner
    return fs


def _is_own(fs: Any, name: str) -> bool:
    """True if the filesystem brings this method itself, instead of fsspec's copy and remove."""
    method, default = getattr(fs, name, None), getattr(AbstractFileSystem, name)
    return callable(method) and getattr(method, "__func__", method) is not default


def _replace_on_smb(fs: Any, source: str, target: str) -> None:
    # fsspec's mv refuses an existing target; the client under it need not
    import smbclient  # type: ignore[import-not-found]

    for pause_seconds in _SMB_PAUSES_SECONDS:
        try:
            unc = [f"\\\\{fs.host}" + path.replace("/", "\\") for path in (source, target)]
            smbclient.replace(*unc, port=fs.port or 445)
            return
        except OSError as error:
            if getattr(error, "ntstatus", 0) not in _SMB_HELD_OPEN or not pause_seconds:
                raise
        time.sleep(pause_seconds)
