"""Single files, as the storage of checkpoints knows them: a directory, and a name in it."""

from __future__ import annotations

import os
import re
from typing import Final

from dcp_nvcomp.errors import ConfigurationError

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")


def fault_of_name(name: str) -> str | None:
    """Return why no file of a checkpoint may have this relative path; None if one may."""
    parts = name.split("/")
    if "\\" in name or any(ord(character) < 32 for character in name):
        return "it has a backslash or a control character"
    if name.startswith("/") or _SCHEME.match(name) or "::" in name:
        return "it is not relative"
    if ".." in parts or "." in parts or "" in parts:
        return "it has an empty, '.' or '..' part"
    return None


def parent_and_name(path: str) -> tuple[str, str]:
    """Return the directory or URL that a file is in, and its name there."""
    parent, separator, name = path.rpartition("/")
    if not name:
        raise ConfigurationError(f"{path!r} names a directory, not a file.")
    if fault_of_name(name):
        raise ConfigurationError(
            f"{name!r} can't be the name of a file here, as names with '::', with a backslash or a control character, "
            "or that begin like a URL can't: choose another one.",
            path=path,
        )
    if not separator:
        return os.curdir, name
    if parent.endswith((":/", "://")):  # at the root of a storage: memory://x, file:///x
        return f"{parent}/", name
    return parent or "/", name
