"""Uploads a step from the fast tier to the durable one: its files as they are, then the commit of docs/reliability.md.

Each file is sent once, by one rank that has it. What an upload that was cut short has left there already, whole, is not
sent again: a name is used for one file only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.storage.base import Filesystem

_PIECE_NBYTES = 16 << 20


class SourceError(StorageError):
    """A file that is to be uploaded can't be read."""


def upload_files(source: Filesystem, target: Filesystem, names: Collection[str], sizes: Mapping[str, int]) -> int:
    """Copy files to a directory."""
    target.refuse_link()
    target.create_directory()
    there = {file.name: file.nbytes for file in target.list_files()}
    missing = [name for name in sorted(names) if there.get(name) != sizes[name]]
    target.remove([name for name in missing if name in there])  # cut short
    for name in missing:
        _upload(source, target, name, sizes[name])
    return sum(sizes[name] for name in missing)


def _upload(source: Filesystem, target: Filesystem, name: str, nbytes: int) -> None:
    output = target.open_output(name)
    try:
        buffer = memoryview(bytearray(min(nbytes, _PIECE_NBYTES)))
        for start in range(0, nbytes, _PIECE_NBYTES):
            piece = buffer[: min(_PIECE_NBYTES, nbytes - start)]
            try:
                source.read_into(name, start, piece)
            except CheckpointError as error:
                raise SourceError(error.message, path=source.location(name)) from error
            output.write(piece)
        output.close()
    except BaseException:
        output.abort()
        raise
