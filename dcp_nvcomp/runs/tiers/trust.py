"""Whose the files of a fast tier are: what is restored from there is unpickled, so all of it must be the user's own.

In /dev/shm and /tmp any user may make a directory of any name before the job does. So one that is there must belong to
the user, with no one else who may write to it or replace it; and what is below it of others counts as not there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.storage.base import storage_errors

ALONE: Final = 0o700
_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_ENTER: Final = stat.S_IXGRP | stat.S_IXOTH
_UNMAPPED: Final = 65534  # root, where a container or NFS does not map it
_INSTEAD: Final = "choose a directory of your own, such as one below /dev/shm/<your name>"


def own_directory(path: str) -> None:
    with storage_errors("make the directory", path):
        for folder in [*_missing_above(path), path]:
            with contextlib.suppress(FileExistsError):  # another rank of this node was quicker
                os.mkdir(folder, ALONE)
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):  # out of order, and nothing that would be trusted
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        fault = _fault(found)
        if fault is not None:
            advice = f"`chmod 700 {path}`" if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode) else _INSTEAD
            raise ConfigurationError(f"fast={path!r} {fault}, and what is in it would be trusted: {advice}.")
        loose = _loose_above(path)
        if loose is not None:
            raise ConfigurationError(f"fast={path!r} could be replaced by other users: {loose}")


def _missing_above(path: str) -> list[str]:
    missing: list[str] = []
    while not os.path.isdir(path := os.path.dirname(path)):
        missing.insert(0, path)
    return missing


def _fault(found: os.stat_result, *, others_enter: bool = True) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this process is of user {os.geteuid()}"
    if others_enter and found.st_mode & _WRITE:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so that other users may write to it"
    return None


def _loose_above(path: str) -> str | None:
    """Return what lets others put another directory in the place of this one; None if nothing does."""
    for passed in _passed_on_the_way(os.path.dirname(path)):
        found = os.lstat(passed)
        # the owner of a directory may be another one on purpose: of a project, or of what a container is given
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid(), _UNMAPPED):
            return f"{passed} belongs to user {found.st_uid}: {_INSTEAD}."
        # groups share directories such as projects' on purpose, and many a umask lets a user's own group write
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"{passed} lets them rename what is in it: {_INSTEAD}, or `chmod +t {passed}`."
    return None


def _passed_on_the_way(path: str) -> Iterator[str]:
    """Yield each directory and link through which the system comes to an existing directory, and itself."""
    folder = os.sep
    yield folder
    left = path.split(os.sep)[::-1]
    while left:
        name = left.pop()
        if name == os.pardir:
            folder = os.path.dirname(folder)
        elif name not in ("", os.curdir):
            yield (passed := os.path.join(folder, name))
            if os.path.islink(passed):
                target = os.readlink(passed)
                folder = os.sep if os.path.isabs(target) else folder
                left += target.split(os.sep)[::-1]
            else:
                folder = passed


def fault_below(root: str, name: str) -> str | None:
    """Return why what is in a directory of a fast tier is not to be trusted; None if it is the user's own."""
    path = os.path.join(root, name)
    with storage_errors("look at", path):
        # else they can't reach what is inside, whatever modes the umask gave it
        others_enter = bool(os.lstat(root).st_mode & _ENTER)
        try:
            found = os.lstat(path)
            if (fault := _fault(found, others_enter=others_enter)) is not None:
                return f"it {fault}"
            others_enter = others_enter and bool(found.st_mode & _ENTER)
            with os.scandir(path) as items:
                for item in items:
                    status = item.stat(follow_symlinks=False)
                    if status.st_uid != os.geteuid():
                        return f"{item.name!r} in it belongs to user {status.st_uid}"
                    if item.is_symlink():
                        return f"{item.name!r} in it is a symbolic link"
                    if others_enter and status.st_mode & _WRITE:
                        return f"others may write to {item.name!r} in it"
        except FileNotFoundError:  # removed since it was listed
            return None
    return None


def refuse_fault_below(root: str, name: str) -> None:
    fault = fault_below(root, name)
    if fault is not None:
        raise ConfigurationError(f"In fast={root!r}, {name} is not to be trusted: {fault}. Remove it, or {_INSTEAD}.")
