"""The commit: `.metadata` is published last and atomically; what it replaced is removed only after that.

docs/reliability.md has the reason for each step. Runs publish steps of a fast tier in their own way
(runs/step_save.py), and so do conversion and recovery, which have no save to commit.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.errors import CheckpointError, CheckpointExistsError, StorageError, TruncatedFileError
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.publishable import metadata_to_publish
from dcp_nvcomp.format.metadata.roots import Root, is_missing, read_root
from dcp_nvcomp.format.metadata.shares import end_removal, needed_by_others
from dcp_nvcomp.format.metadata.summary import Summary
from dcp_nvcomp.format.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
    REMOVING,
    rank_metadata_name,
    rank_of_metadata_name,
    save_metadata_name,
)
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.plans.global_plan import PlannedMetadata, files_of
from dcp_nvcomp.storage.base import BESIDE, FileInfo, Filesystem
from dcp_nvcomp.storage.reread import is_stored

logger = logging.getLogger(__name__)

_DENIED = (errno.EACCES, errno.EPERM)


class LastPublished:
    """What one writer published last, by size and digest, and the files of it: these bytes need not be parsed again."""

    def __init__(self) -> None:
        self._known: tuple[int, bytes, frozenset[str]] | None = None  # one value, so that saves may overlap

    def note(self, data: bytes, names: Iterable[str]) -> None:
        self._known = len(data), _digest(data), frozenset(names)

    def names_if_current(self, filesystem: Filesystem, nbytes: int) -> set[str] | None:
        """Return the files of the current checkpoint if it is the one that was published last; else None."""
        known = self._known
        if known is None or nbytes != known[0]:
            return None
        data = filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES)
        return set(known[2]) if _digest(data) == known[1] else None


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def refuse_existing(filesystem: Filesystem, *, rank: int | None) -> None:
    names = [METADATA_NAME]
    if rank is not None:
        names.append(rank_metadata_name(rank))
    else:
        names += [name for name in filesystem.list_names() if rank_of_metadata_name(name) is not None]
    for name in names:
        if filesystem.file_nbytes(name) is not None:
            option = "overwrite=False" if rank is None else "use_collectives=False"
            message = f"Checkpoint already exists, and {option} forbids replacing it. Choose another path."
            raise CheckpointExistsError(message, path=filesystem.location(name))


def _files_of_ranks(filesystem: Filesystem) -> set[str]:
    """The files of a save without collectives, with each rank's metadata, which would count without `.metadata`."""
    found = set()
    try:
        for name in filesystem.list_names():
            if rank_of_metadata_name(name) is not None:
                found |= read_root(filesystem, name).names()
    except CheckpointError as error:
        logger.warning("Metadata of single ranks can't be read, so it is kept: %s", error)
        return set()
    return found


def data_files(metadata: Metadata) -> dict[str, int]:
    return metadata.files() if isinstance(metadata, PlannedMetadata) else files_of(metadata)


def _check_present(filesystem: Filesystem, files: Mapping[str, int]) -> Collection[str]:
    """Make sure that all data files are where readers will look for them, with the sizes that were written.

    Returns the names of all files there, none where credentials don't allow to list them.
    """
    try:
        listed = {file.name: file.nbytes for file in filesystem.list_files()}
    except StorageError as error:
        if error.errno not in _DENIED:
            raise
        listed = {}  # some credentials may read and write but not list
    unseen = sorted(name for name, nbytes in files.items() if listed.get(name) != nbytes)
    states = filesystem.map(lambda name: _missing(filesystem, name, files[name]), unseen)
    problem = next(((name, state) for name, state in zip(unseen, states, strict=True) if state), None)
    if problem is not None:
        name, state = problem
        raise StorageError(
            f"A data file of this save {state}: the coordinator cannot see {len(unseen)} of its {len(files)} data "
            "files as they were written. All ranks must save to the same storage, and no other process may remove "
            "files from it during a save.",
            path=filesystem.location(name),
            errno=errno.ENOENT,
        )
    return listed.keys()


def _missing(filesystem: Filesystem, name: str, nbytes: int) -> str:
    """Return what is wrong with a data file, or "". Network filesystems list and stat from caches, so open it."""
    try:
        filesystem.read(name, nbytes - 1, nbytes)
    except TruncatedFileError:
        return f"is shorter than the {nbytes} bytes that were written"
    except StorageError as error:
        if error.errno in _DENIED:  # write-only credentials cannot verify
            return ""
        if is_missing(error):
            return "is not there"
        raise
    return ""


@dataclass(frozen=True)
class FinishedSave:
    """A save that all ranks have written, and that can't be loaded yet; `own_files` the coordinator wrote itself."""

    metadata: Metadata
    save_id: str
    own_files: tuple[str, ...]
    last: LastPublished
    overwrite: bool
    summary: Summary


# What publishes a save, on the coordinator, from `NvcompWriter.finish`: `commit_checkpoint`, or a run in its own way.
Publisher: TypeAlias = Callable[[Filesystem, FinishedSave], None]


def commit_checkpoint(filesystem: Filesystem, save: FinishedSave) -> None:
    try:
        data = to_publish(save.metadata, filesystem.location(METADATA_NAME), save.summary)
    except CheckpointError:
        remove_files(filesystem, save.own_files, "a save that was not published")
        raise
    written = WrittenSave(data, save.save_id, data_files(save.metadata), save.own_files)
    commit_files(filesystem, written, save.last, overwrite=save.overwrite)


@dataclass(frozen=True)
class WrittenSave:
    """A save with the bytes of its `.metadata`, the sizes of all its data files, and those to remove if it fails."""

    data: bytes = field(repr=False)
    save_id: str
    files: Mapping[str, int]
    own_files: tuple[str, ...]


def commit_files(filesystem: Filesystem, save: WrittenSave, last: LastPublished, *, overwrite: bool) -> None:
    copy = save_metadata_name(save.save_id)
    try:
        current = files_of_current(filesystem, last, seen=lambda root: _warn_of_stock(filesystem, root))
        replaced = (current or set()) | _files_of_ranks(filesystem)
        filesystem.publish(copy, save.data)
        if REMOVING in _check_present(filesystem, save.files):
            filesystem.remove([REMOVING])  # of a removal that was cut short, which would go on with this save
    except (CheckpointError, Warning):
        remove_files(filesystem, {copy, *save.own_files}, "a save that was not published")
        raise
    try:
        filesystem.publish(METADATA_NAME, save.data, overwrite=overwrite)
    except CheckpointError as error:
        published = _is_published(filesystem, save)
        # if the storage may still carry it out, `.metadata` would name files that were removed
        if published is False and not error.outcome_unknown:
            remove_files(filesystem, {copy, *save.own_files}, "a save that could not be published")
        if published is not True:
            if error.outcome_unknown:
                error.message += (
                    " The storage may yet do it: whether this save is published is not known. Its files stay, and "
                    "`dcp-nvcomp clean` removes them if it is not."
                )
            raise
        # it is there, but perhaps not durably (after a failed fsync, say), so keep the old files
        logger.warning("The checkpoint was published, though the storage reported an error: %s", error)
        return
    kept = {METADATA_NAME, copy, *(name for name in save.files if not name.startswith(BESIDE))}
    last.note(save.data, kept)
    remove_unneeded(filesystem, replaced - kept, "the checkpoint that was replaced")


def _warn_of_stock(filesystem: Filesystem, root: Root) -> None:
    """Warn of a checkpoint of stock DCP that is about to be replaced, as stock DCP does of each that it overwrites."""
    if None in root.files().values():
        warnings.warn(
            f"Detected an existing checkpoint of stock DCP in {without_secrets(filesystem.path)}, overwriting it: its "
            "data files are removed once this one is published. Save to a path of its own to keep it, or pass "
            "overwrite=False to raise where there is a checkpoint.",
            UserWarning,
            stacklevel=2,
        )


def to_publish(metadata: Metadata, path: str, summary: Summary | None) -> bytes:
    if isinstance(metadata, PlannedMetadata):
        return metadata.to_publish(path, summary)
    return metadata_to_publish(metadata, path=path, summary=summary)


def _is_published(filesystem: Filesystem, save: WrittenSave) -> bool | None:
    """Return True if `.metadata` is this save's: storage may carry out what it fails to confirm. None if unknown."""
    try:
        if filesystem.file_nbytes(METADATA_NAME) is None:
            return False
        if is_stored(lambda: filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES), save.data):
            return True
        # a False has our files removed: so only if what is there can be read, and is of another save
        return None if read_root(filesystem, METADATA_NAME).save_id == save.save_id else False
    except CheckpointError:
        return None


def commit_rank(filesystem: Filesystem, metadata: Metadata, rank: int, own_files: Iterable[str]) -> None:
    name = rank_metadata_name(rank)
    try:
        data = metadata_to_publish(metadata, path=filesystem.location(name))
    except CheckpointError:
        remove_files(filesystem, own_files, "a save that was not published")
        raise
    end_removal(filesystem)
    filesystem.publish(name, data, overwrite=False)


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
        self._path, self._names, self._thread = path, tuple(names), threading.current_thread()

    def remove(self, open_at: Callable[[str], Filesystem]) -> None:
        """Remove this rank's files of the last save, which failed, unless a checkpoint names them."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            return  # that save may still be under way: asynchronous saves can overlap
        self.remove_ended(open_at)

    def remove_ended(self, open_at: Callable[[str], Filesystem]) -> bool:
        """Remove the same of a save that is known to be over on this rank; False if that has to be tried again."""
        names = self._names
        if names:
            filesystem = open_at(self._path)
            named = files_of_current(filesystem)
            if named is None or not remove_unneeded(filesystem, set(names) - named, "an earlier, failed save"):
                return False
            if self._names is names:  # else a save that overlaps has written more
                self._names = ()
        return True


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


def remove_unneeded(filesystem: Filesystem, names: Iterable[str], whose: str) -> bool:
    """Remove files of an earlier save but for those that checkpoints beside this one share; False if that failed."""
    names = set(names)
    if not names:
        return True
    try:
        needed = needed_by_others(filesystem, _listed(filesystem))
    except CheckpointError as error:
        logger.warning("Files of %s are kept, as it is not known whether others share them: %s", whose, error)
        return False
    kept = {name for name in names if name in needed}
    if kept:
        logger.info("%d files of %s stay, as checkpoints beside it share them.", len(kept), whose)
    return remove_files(filesystem, names - kept, whose)


def _listed(filesystem: Filesystem) -> list[FileInfo]:
    """Return the files of a directory; none for credentials that can't list, which could not have shared any either."""
    try:
        return filesystem.list_files()
    except StorageError as error:
        if error.errno not in _DENIED:
            raise
        return []


def remove_files(filesystem: Filesystem, names: Iterable[str], whose: str) -> bool:
    """Remove leftovers, metadata first; False if that failed.

    A failure is only logged: it must not fail the save, or hide why it failed.
    """
    names = set(names)
    data_files = {name for name in names if name.endswith(DATA_FILE_SUFFIX)}
    try:
        filesystem.remove(sorted(names - data_files))
        filesystem.remove(sorted(data_files))
    except CheckpointError as error:
        logger.warning("Files of %s could not be removed: %s", whose, error)
        return False
    return True
