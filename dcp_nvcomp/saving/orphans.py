"""Files that no checkpoint needs any more: those of a checkpoint that was replaced, and of saves that failed."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable

from dcp_nvcomp.errors import (
    CheckpointError,
    StorageError,
)
from dcp_nvcomp.format.metadata.roots import read_root
from dcp_nvcomp.format.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
)
from dcp_nvcomp.storage.base import Filesystem

__all__ = ["Orphans", "files_of_current", "remove_files"]

logger = logging.getLogger(__name__)


class Orphans:
    """A rank's own files of saves that failed on other ranks: of such a save it never hears the end.

    At the next save the coordinator tells all ranks, in their plans, whether its last save failed before it was
    published. A rank that hears so looks at what the checkpoint at that path names, and removes those of its files
    that are not among it. A message that is lost or replayed by cached plans does no harm: it only decides whether a
    rank looks, never what it removes.
    """

    def __init__(self) -> None:
        self._path = ""
        self._names: tuple[str, ...] = ()
        self._thread = threading.current_thread()

    def wrote(self, path: str, names: Iterable[str]) -> None:
        """This thread's save wrote these files to the checkpoint at `path`."""
        self._path, self._names, self._thread = path, tuple(names), threading.current_thread()

    def remove(self, open_at: Callable[[str], Filesystem]) -> None:
        """The last save failed: remove this rank's files of it that belong to no checkpoint.

        Args:
            open_at: opens the filesystem of a checkpoint.
        """
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            return  # that save may still be under way: asynchronous saves can overlap
        names, self._names = self._names, ()
        if names:
            filesystem = open_at(self._path)
            named = files_of_current(filesystem)
            if named is not None:
                remove_files(filesystem, set(names) - named, "an earlier, failed save")


def files_of_current(filesystem: Filesystem) -> set[str] | None:
    """The files of the checkpoint that is there now; none if there is none, None if it can't be read.

    Raises:
        StorageError: the storage did not answer until the deadline: it need not be asked again.
    """
    try:
        if filesystem.file_nbytes(METADATA_NAME) is None:
            return set()
        return read_root(filesystem, METADATA_NAME).names()
    except CheckpointError as error:
        if isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT:
            raise
        logger.warning("The checkpoint that is there can't be read, so its files stay: %s", error)
        return None


def remove_files(filesystem: Filesystem, names: Iterable[str], whose: str) -> None:
    """Remove files whose fate changes nothing: a failure is no reason to fail the save, or to hide why it failed.

    Metadata goes first: what is left of it when this is cut short never names files that are gone.
    """
    names = set(names)
    data_files = {name for name in names if name.endswith(DATA_FILE_SUFFIX)}
    try:
        filesystem.remove(sorted(names - data_files))
        filesystem.remove(sorted(data_files))
    except CheckpointError as error:
        logger.warning("Files of %s could not be removed: %s", whose, error)
