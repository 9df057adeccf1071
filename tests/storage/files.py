"""Filesystems as tests open them, and a file in one."""

from __future__ import annotations

from typing import Any

from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.servers.base import Location

# The smallest part of an upload that each kind of storage takes.
PART_NBYTES = {"s3": 5 << 20, "az": 5 << 20, "gs": 1 << 18, "sftp": 1 << 18, "smb": 1 << 18}


def opened(place: Location, *, deadline_seconds: float = 60.0, below: str = "", **options: Any) -> Filesystem:
    """Open a place, or a directory below it."""
    url = f"{place[0]}/{below}" if below else place[0]
    return open_filesystem(url, storage_options={**place[1], **options}, deadline_seconds=deadline_seconds)


def made(place: Location, **options: Any) -> Filesystem:
    """Open a place, and make its directory."""
    filesystem = opened(place, **options)
    filesystem.create_directory()
    return filesystem


def part_nbytes(place: Location) -> int | None:
    """Return the smallest part of a file that may be chosen there; None if nothing goes there in parts."""
    return PART_NBYTES.get(place[0].partition("://")[0])


def in_parts(place: Location) -> dict[str, int]:
    """Return the option by which files go to a place in the smallest parts."""
    nbytes = part_nbytes(place)
    return {} if nbytes is None else {"default_block_size": nbytes}


def write_file(filesystem: Filesystem, name: str, data: bytes) -> None:
    stream = filesystem.open_output(name)
    stream.write(data)
    stream.close()
