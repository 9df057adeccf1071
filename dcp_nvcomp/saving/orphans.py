"""Removes files that no checkpoint needs any more: of replaced checkpoints and of failed saves."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable

from dcp_nvcomp.errors import (
    CheckpointError,
    StorageError,
)
from dcp_nvcomp.format.metadata.roots import Root, read_root
from dcp_nvcomp.format.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
)
from dcp_nvcomp.saving.published import LastPublished
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)


class Orphans:
    """Files this rank wrote for a save that failed on another rank; DCP does not notify ranks that had finished.

    At the next save, the plans from the coordinator say whether the previous save failed before it was published. If
    so, a rank reads which files the checkpoint at that path names, and removes its own files that are not among them.
    A message that is lost or replayed by cached plans does no harm: it only decides whether a rank looks, never what it
    removes.
    """

    def __init__(self) -> None:
        self._path = ""
        self._names: tuple[str, ...] = ()
        self._thread = threading.current_thread()

    def wrote(self, path: str, names: Iterable[str]) -> None:
        """Remember that this thread's save wrote these files to the checkpoint at `path`."""
        self._path, self._names, self._thread = path, tuple(names), threading.current_thread()

    def remove(self, open_at: Callable[[str], Filesystem]) -> None:
        """Remove this rank's files of the last save, which failed, unless a checkpoint names them."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            return  # that save may still be under way: asynchronous saves can overlap
        names, self._names = self._names, ()
        if names:
            filesystem = open_at(self._path)
            named = files_of_current(filesystem)
            if named is not None:
                remove_files(filesystem, set(names) - named, "an earlier, failed save")


def files_of_current(
    filesystem: Filesystem, last: LastPublished | None = None, *, seen: Callable[[Root], None] = lambda root: None
) -> set[str] | None:
    """Return the files of the current checkpoint: an empty set if there is none, None if it can't be read."""
    try:
        nbytes = filesystem.file_nbytes(METADATA_NAME)
        if nbytes is None:
            return set()
        own = last.names_if_current(filesystem, nbytes) if last is not None else None
        if own is not None:
            return own
        root = read_root(filesystem, METADATA_NAME)
        seen(root)
        return root.names()
    except CheckpointError as error:
        if isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT:
            raise
        logger.warning("The previous checkpoint can't be read, so its files are kept: %s", error)
        return None


def remove_files(filesystem: Filesystem, names: Iterable[str], whose: str) -> None:
    """Remove leftovers. A failure is only logged: it must not fail the save, or hide why the save failed.

    Metadata is removed first, so that if this is interrupted, no remaining metadata names removed files.
    """
    names = set(names)
    data_files = {name for name in names if name.endswith(DATA_FILE_SUFFIX)}
    try:
        filesystem.remove(sorted(names - data_files))
        filesystem.remove(sorted(data_files))
    except CheckpointError as error:
        logger.warning("Files of %s could not be removed: %s", whose, error)
