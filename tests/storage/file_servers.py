"""SFTP and SMB as tests open them."""

from __future__ import annotations

from typing import Any

from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

from .suite import Place

PART_NBYTES = 1 << 18


def opened(place: Place, **options: Any) -> Filesystem:
    url, given = place
    deadline_seconds = options.pop("deadline_seconds", 20.0)
    return open_filesystem(url, storage_options={**given, **options}, deadline_seconds=deadline_seconds)


def made(place: Place, **options: Any) -> Filesystem:
    """Open it, and make its directory."""
    filesystem = opened(place, **options)
    filesystem.create_directory()
    return filesystem


def connections(kind: str) -> Any:
    """The class whose methods ask the server."""
    from dcp_nvcomp.storage.file_servers.sftp import SftpConnection
    from dcp_nvcomp.storage.file_servers.smb import SmbConnection

    return SftpConnection if kind == "sftp" else SmbConnection
