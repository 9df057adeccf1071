"""Single files, as the storage of checkpoints knows them: a directory, and a name in it."""

from __future__ import annotations

import os

from dcp_nvcomp.errors import ConfigurationError

__all__ = ["parent_and_name"]


def parent_and_name(path: str) -> tuple[str, str]:
    """Return the directory or URL that a file is in, and its name there.

    Raises:
        ConfigurationError: the path names no file.
    """
    parent, separator, name = path.rpartition("/")
    if not name:
        raise ConfigurationError(f"{path!r} names a directory, not a file.")
    if not separator:
        return os.curdir, name
    if parent.endswith((":/", "://")):  # at the root of a storage: memory://x, file:///x
        return f"{parent}/", name
    return parent or "/", name
