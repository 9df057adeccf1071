"""Storage that is used from another process of this machine, which knows fsspec's filesystems only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import fsspec
from fsspec.registry import known_implementations

__all__ = ["filesystem_classes", "is_known_elsewhere", "register_filesystems"]

_PROTOCOLS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(?=::|://)")
_IN_PROCESS = ("memory",)


def filesystem_classes(path: str | os.PathLike[str]) -> dict[str, type]:
    """Return the fsspec classes of a URL by protocol; none for a local path."""
    return {name: fsspec.get_filesystem_class(name) for name in map(str.lower, _PROTOCOLS.findall(os.fspath(path)))}


def is_known_elsewhere(path: str | os.PathLike[str]) -> bool:
    """True if another process finds the same storage at this path or URL.

    Not the memory of this one, nor a filesystem that was registered here, of which nobody knows where it keeps things.
    """
    try:
        classes = filesystem_classes(path)
    except (ImportError, ValueError):  # the save will say so
        return False
    return all(name not in _IN_PROCESS and _is_fsspecs_own(name, found) for name, found in classes.items())


def register_filesystems(classes: Mapping[str, type]) -> None:
    """Let URLs with these protocols be opened in this process as they are in another."""
    for name, found in classes.items():
        if not _is_fsspecs_own(name, found):
            fsspec.register_implementation(name, found, clobber=True)


def _is_fsspecs_own(protocol: str, found: type) -> bool:
    """True if fsspec finds this class by itself; it may name a package that only passes it on."""
    known = known_implementations.get(protocol, {}).get("class", "").split(".")
    return (known[0], known[-1]) == (found.__module__.split(".")[0], found.__name__)
