"""The commit: `.metadata` is published last and atomically; what it replaced is removed only after that.

1  read which files the checkpoint that is there now names
2  publish __<save_id>.metadata: the same bytes under a name of its own, for recovery
3  publish .metadata: from here on the new checkpoint exists, and the old one does not
4  remove the old one's files; a crash in between leaves orphans, which do no harm
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.errors import CheckpointError, CheckpointExistsError, StorageError
from dcp_nvcomp.filesystem import Filesystem
from dcp_nvcomp.format import MAX_METADATA_NBYTES
from dcp_nvcomp.metadata import (
    METADATA_NAME,
    parse_metadata,
    rank_metadata_name,
    save_metadata_name,
    serialize_metadata,
)

__all__ = ["Orphans", "commit_checkpoint", "commit_rank", "files_named_by", "refuse_existing"]

logger = logging.getLogger(__name__)


def refuse_existing(filesystem: Filesystem, *, rank: int | None) -> None:
    """Make sure that there is no checkpoint.

    Args:
        filesystem: the checkpoint's directory.
        rank: with `use_collectives=False` the rank, whose own rank-local metadata counts as well. The others' can't:
            theirs may be of this very save.

    Raises:
        CheckpointExistsError: there is one.
    """
    names = [METADATA_NAME] if rank is None else [METADATA_NAME, rank_metadata_name(rank)]
    for name in names:
        if filesystem.file_nbytes(name) is not None:
            why = (
                "overwrite=False" if rank is None else "a save with use_collectives=False can't replace one atomically"
            )
            raise CheckpointExistsError(
                f"There is a checkpoint already, and {why}. Choose another path.", path=filesystem.location(name)
            )


def files_named_by(metadata: Metadata) -> set[str]:
    """Names of the data files of a checkpoint, and of its immutable metadata; of a stock checkpoint too."""
    names = set()
    for value in (metadata.storage_data or {}).values():
        names.add(value[0][0] if isinstance(value, tuple) else value.relative_path)
    save_id = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
    if save_id is not None and len(save_id) == 32:
        names.add(save_metadata_name(save_id))
    return names


def _files_of_current(filesystem: Filesystem) -> set[str]:
    """What the checkpoint that is there now names; nothing if there is none or it can't be read."""
    try:
        if filesystem.file_nbytes(METADATA_NAME) is None:
            return set()
        data = filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES)
        return files_named_by(parse_metadata(data, path=filesystem.location(METADATA_NAME)))
    except CheckpointError as error:
        logger.warning("The checkpoint that is being replaced can't be read, so its files stay: %s", error)
        return set()


def commit_checkpoint(
    filesystem: Filesystem, metadata: Metadata, save_id: str, own_files: Iterable[str], *, overwrite: bool
) -> None:
    """Publish a checkpoint.

    Args:
        filesystem: the checkpoint's directory.
        metadata: complete, its data files all durable.
        save_id: its id.
        own_files: the data files that this rank wrote; removed if the checkpoint is certainly not published.
        overwrite: whether it may replace another.

    Raises:
        ConcurrentSaveError: it may not, and another save was published in the meantime.
        StorageError: it could not be published, or it is unknown whether it was.
    """
    replaced = _files_of_current(filesystem)
    data = serialize_metadata(metadata)
    copy = save_metadata_name(save_id)
    try:
        filesystem.publish(copy, data)
        filesystem.publish(METADATA_NAME, data, overwrite=overwrite)
    except CheckpointError:
        published = _is_published(filesystem, data)
        if published is False:
            _remove(filesystem, {copy, *own_files}, "a save that could not be published")
        if published is not True:
            raise
    _remove(filesystem, replaced - files_named_by(metadata), "the checkpoint that was replaced")


def _remove(filesystem: Filesystem, names: Iterable[str], whose: str) -> None:
    """Remove files whose fate changes nothing: a failure is no reason to fail the save, or to hide why it failed."""
    try:
        filesystem.remove(names)
    except StorageError as error:
        logger.warning("Files of %s could not be removed: %s", whose, error)


def _is_published(filesystem: Filesystem, data: bytes) -> bool | None:
    """Whether `.metadata` is ours after all: storage may do what it fails to confirm. None: it can't be told."""
    try:
        if filesystem.file_nbytes(METADATA_NAME) is None:
            return False
        return filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES) == data
    except CheckpointError:
        return None


def commit_rank(filesystem: Filesystem, metadata: Metadata, rank: int) -> None:
    """Publish one rank's metadata of a save with `use_collectives=False`."""
    filesystem.publish(rank_metadata_name(rank), serialize_metadata(metadata), overwrite=False)


class Orphans:
    """A rank's own files of saves that failed on other ranks: of such a save it never hears the end.

    At the next save each rank asks, in its plan, about the files that it wrote last; the coordinator knows what it has
    committed, and answers with those that it has not. The answer may be replayed by cached plans: names are unique to
    one save, so removing them twice does no harm.
    """

    def __init__(self) -> None:
        self._written: dict[str, str] = {}
        self._committed: list[frozenset[str]] = []

    def wrote(self, path: str, names: Iterable[str]) -> None:
        """This rank wrote these files to the checkpoint at `path`."""
        self._written.update(dict.fromkeys(names, path))

    def committed(self, names: Iterable[str]) -> None:
        """The coordinator committed a checkpoint of these files."""
        # a rank asks about its last save; a few more in case that ranks failed before they asked
        self._committed = [*self._committed[-3:], frozenset(names)]

    def question(self) -> Any:
        """What a rank puts into its plan."""
        return tuple(self._written)

    def answer(self, question: Any) -> Any:
        """What the coordinator puts into the plan instead: which of those files to remove."""
        if not isinstance(question, tuple):
            return ()
        known = frozenset().union(*self._committed)
        return question, tuple(name for name in question if name not in known)

    def remove(self, answer: Any, open_at: Callable[[str], Filesystem]) -> None:
        """Remove what the coordinator has not committed.

        Args:
            answer: from `answer`.
            open_at: opens the filesystem of a checkpoint.
        """
        if not isinstance(answer, tuple) or len(answer) != 2:
            return
        asked, orphans = answer
        by_path: dict[str, list[str]] = {}
        for name in orphans:
            if name in self._written:
                by_path.setdefault(self._written[name], []).append(name)
        for path, names in by_path.items():
            _remove(open_at(path), names, "an earlier, failed save")
        for name in asked:
            self._written.pop(name, None)
