"""Checkpoints that share data files with others beside them: the marks that say so, and which of them need which files.

A checkpoint may name data files of others in the same parent directory (saving/references.py). Before it is published,
it leaves a mark in the directory of each of these:

    .shared.<directory>      holds the id of the save that shares; <directory> is the name of its directory

Whoever is about to remove data files looks for marks, and for each mark into the metadata of the directory that it
names, or the immutable copy if that is lost. So a mark alone keeps nothing for long: one of a save that is not what is
published there, as it failed or is about to be, keeps all files for an hour.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dcp_nvcomp.errors import CheckpointError, CheckpointReplacedError, StorageError
from dcp_nvcomp.format.metadata.roots import Root, is_missing, read_root
from dcp_nvcomp.format.metadata.summary import SUMMARY_NBYTES
from dcp_nvcomp.format.names import (
    METADATA_NAME,
    REMOVING,
    copy_name_of,
    mark_name,
    marking_directory,
    shared_directories,
)
from dcp_nvcomp.storage.base import BESIDE, FileInfo, Filesystem

# How long a mark counts whose save is not published: it was written right before that.
_UNPUBLISHED_SECONDS: Final = 3600.0
_ID_NBYTES: Final = 32  # of a save
_READ_ONLY: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def leave_marks(filesystem: Filesystem, directory: str, names: Iterable[str], save_id: str) -> None:
    """Mark the directories of files that a checkpoint, a save in `directory`, shares.

    Raises:
        CheckpointReplacedError: one of them was removed, or is being removed. If that begins later, it finds the mark.
        StorageError: one of them can't be written to.
    """
    for shared in shared_directories(names):
        try:
            filesystem.publish(f"{BESIDE}{shared}/{mark_name(directory)}", save_id.encode())
        except StorageError as error:
            if is_missing(error):
                raise CheckpointReplacedError(
                    f"The checkpoint in {shared!r}, whose files this one was to share, was removed: try again.",
                    path=filesystem.path,
                ) from error
            if error.errno not in _READ_ONLY:
                raise
            raise StorageError(
                f"The directory {shared!r}, whose files this checkpoint was to share, has to be writable, as a mark "
                f"there keeps them: {error.message}",
                path=error.path,
                errno=error.errno,
            ) from error
        if is_being_removed(filesystem, shared):
            raise CheckpointReplacedError(
                f"The checkpoint in {shared!r}, whose files this one was to share, is being removed: try again. If "
                "that was cut short, `dcp-nvcomp prune` ends it first, and leaves what is needed.",
                path=filesystem.path,
            )


def is_being_removed(filesystem: Filesystem, beside: str | None = None) -> bool:
    """Return whether the removal of a checkpoint, or of one beside it, has begun; it may have been cut short."""
    mark = REMOVING if beside is None else f"{BESIDE}{beside}/{REMOVING}"
    return filesystem.file_nbytes(mark) is not None


def end_removal(filesystem: Filesystem) -> None:
    """Take away the mark of a removal that was cut short: what is published next would be removed with the rest."""
    if is_being_removed(filesystem):
        filesystem.remove([REMOVING])


def state_beside(filesystem: Filesystem, directory: str) -> bytes | None:
    """Return the end of the metadata of a checkpoint beside, which differs for each save; None without metadata."""
    name = f"{BESIDE}{directory}/{METADATA_NAME}"
    nbytes = filesystem.file_nbytes(name)
    return None if nbytes is None else filesystem.read(name, max(nbytes - SUMMARY_NBYTES, 0), nbytes)


def remove_marks(filesystem: Filesystem, directory: str, shared: Iterable[str]) -> None:
    """Remove the marks of a checkpoint that shares nothing with these directories any more."""
    filesystem.remove([f"{BESIDE}{one}/{mark_name(directory)}" for one in shared])


@dataclass(frozen=True)
class Needed:
    """What of a checkpoint's directory others beside it need."""

    names: frozenset[str] = frozenset()  # of data files, and of the marks that say so
    everything: bool = False  # if it is not known

    def __contains__(self, name: str) -> bool:
        return self.everything or name in self.names

    def __bool__(self) -> bool:
        return self.everything or bool(self.names)


def needed_by_others(filesystem: Filesystem, files: Sequence[FileInfo]) -> Needed:
    """Return which of the files of a checkpoint's directory others need.

    Args:
        filesystem: the checkpoint's.
        files: all files of its directory.

    Raises:
        StorageError: the storage fails.
    """
    marks = [(file, directory) for file in files if (directory := marking_directory(file.name)) is not None]
    found: set[str] = set()
    for file, directory in marks:
        try:
            marking = filesystem.read_all(file.name, limit_nbytes=_ID_NBYTES).decode("ascii", "replace")
            root = _root_of(filesystem, directory, marking)
        except CheckpointError as error:
            if not is_missing(error) or _is_young(filesystem, file):
                return Needed(everything=True)
            continue
        # a save over that checkpoint may be about to publish
        if marking != (root.save_id or "") and _is_young(filesystem, file):
            return Needed(everything=True)
        names = {name.rpartition("/")[2] for name in root.files() if name.startswith(BESIDE)}
        found |= names & {other.name for other in files}
        if names:
            found.add(file.name)
    return Needed(frozenset(found))


def _is_young(filesystem: Filesystem, mark: FileInfo) -> bool:
    """Return False if a mark is certainly too old for its save to be under way."""
    try:
        now_seconds = filesystem.now_seconds()
    except CheckpointError:  # of credentials that may not ask for the time, say
        return True
    return mark.modified_seconds is None or now_seconds - mark.modified_seconds < _UNPUBLISHED_SECONDS


def _root_of(filesystem: Filesystem, directory: str, marking: str) -> Root:
    """Return the metadata of a checkpoint beside, or if that is lost the copy of the save that left the mark."""
    try:
        return read_root(filesystem, f"{BESIDE}{directory}/{METADATA_NAME}")
    except CheckpointError as error:
        copy = copy_name_of(marking)
        if copy is None or not is_missing(error):
            raise
        return read_root(filesystem, f"{BESIDE}{directory}/{copy}")  # what `recover` publishes again
