"""Remove what failed or killed saves left in a checkpoint, or in each checkpoint below a directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from dcp_nvcomp.format.names import own_file, own_upload
from dcp_nvcomp.format.recognition import recognize
from dcp_nvcomp.maintenance.opening import document, nothing_below, opened
from dcp_nvcomp.maintenance.orphan_search import Found, Orphan, look
from dcp_nvcomp.storage.base import Filesystem

MIN_AGE_SECONDS: Final = 3600.0
# Files that are removed after one look at the roots.
BATCH: Final = 1000


@dataclass(frozen=True)
class Cleaning:
    """Result of `clean`.

    Attributes:
        path: the checkpoint.
        dry_run: True if nothing was removed.
        older_than_seconds: nothing younger than this was removed.
        orphans: what was removed, or would have been.
        young: how many files and uploads no root names, but are too young.
        foreign: files of the names that stock DCP uses, which no root names; they are kept.
        recoverable: ids of complete saves that were kept although there is no `.metadata`: `recover` could bring one
            back. Of a checkpoint of stock DCP it is the name of the `.metadata.<id>.tmp` that was moved aside.
    """

    path: str
    dry_run: bool
    older_than_seconds: float
    orphans: tuple[Orphan, ...]
    young: int
    foreign: tuple[str, ...]
    recoverable: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the orphans together."""
        return sum(orphan.nbytes for orphan in self.orphans)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values. Keys are only ever added to this document; `schema` changes if one must go."""
        return document(self, "checkpoint", nbytes=self.nbytes)


def clean(
    path: str | os.PathLike[str],
    *,
    older_than_seconds: float = 86400.0,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Cleaning:
    """Remove orphaned files and unfinished uploads of one checkpoint's directory.

    Args:
        path: a local path or any fsspec URL.
        older_than_seconds: files written less than this long ago are kept; at least an hour. It must be longer than
            the longest save to this path takes: nothing else distinguishes a running save from a dead one.
        dry_run: only report what would be removed.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Returns:
        What was removed.

    Raises:
        ConfigurationError: an option can't work or is unknown.
        CheckpointNotFoundError: there is no checkpoint, and nothing that a save of ours left.
        FormatError, MetadataError, UnsafePathError: a root can't be read; nothing was removed.
        FileMismatchError, StorageError: a file that a root names is missing or of another size; nothing was removed.
            Or the storage fails.
    """
    check_age(older_than_seconds)
    with opened(path, storage_options) as filesystem:
        try:
            found = look(filesystem, older_than_seconds)
        except CheckpointNotFoundError as error:
            _point_to_recursive(filesystem, error)
            raise
        removed = found.orphans if dry_run else list(_remove(filesystem, older_than_seconds, found))
        return Cleaning(
            filesystem.path,
            dry_run,
            float(older_than_seconds),
            tuple(removed),
            found.young,
            tuple(found.foreign),
            found.recoverable,
        )


def _point_to_recursive(filesystem: Filesystem, error: CheckpointNotFoundError) -> None:
    with contextlib.suppress(CheckpointError):  # the storage fails now: the first error is the one to raise
        if recognize(filesystem).kind == "run":
            error.message = (
                "This is a directory with checkpoints below it, not a checkpoint: `dcp-nvcomp clean --recursive`, or "
                "`clean_run`, cleans all of them."
            )


def check_age(older_than_seconds: float) -> None:
    """Raise ConfigurationError if files of this age may belong to a save under way."""
    if not isinstance(older_than_seconds, int | float) or not older_than_seconds >= MIN_AGE_SECONDS:
        raise ConfigurationError(f"older_than_seconds={older_than_seconds!r} must be at least {MIN_AGE_SECONDS:.0f}.")


def _remove(filesystem: Filesystem, older_than_seconds: float, found: Found) -> Iterator[Orphan]:
    """Remove what still is an orphan, and yield it."""
    metadata = [orphan for orphan in found.orphans if orphan.kind in ("metadata", "temporary")]
    data = [orphan for orphan in found.orphans if orphan.kind == "data"]
    batches = [metadata] + [data[start : start + BATCH] for start in range(0, len(data), BATCH)]
    for batch in batches:
        if batch:
            # a save may have been published since, or be about to
            now = look(filesystem, older_than_seconds).orphans
            names = {orphan.name for orphan in now if orphan.kind != "upload"}
            going = [orphan for orphan in batch if orphan.name in names]
            filesystem.remove([orphan.name for orphan in going])
            yield from going
    if found.uploads:
        dead = {upload for _, upload in look(filesystem, older_than_seconds).uploads}  # as with files
        going_uploads = [(orphan, upload) for orphan, upload in found.uploads if upload in dead]
        filesystem.abort_uploads([upload for _, upload in going_uploads])
        yield from (orphan for orphan, _ in going_uploads)


@dataclass(frozen=True)
class Refusal:
    """A checkpoint in which nothing was removed."""

    path: str
    error: str  # why, in one line


@dataclass(frozen=True)
class RunCleaning:
    """Result of `clean_run`.

    Attributes:
        path: the run.
        dry_run: True if nothing was removed.
        older_than_seconds: nothing younger than this was removed.
        checkpoints: what was done in each directory, by path.
        refused: the directories that could not be listed or cleaned, such as corrupt checkpoints.
    """

    path: str
    dry_run: bool
    older_than_seconds: float
    checkpoints: tuple[Cleaning, ...]
    refused: tuple[Refusal, ...]

    @property
    def nbytes(self) -> int:
        """Size of all orphans together."""
        return sum(one.nbytes for one in self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        checkpoints = [one.to_json() for one in self.checkpoints]
        refused = [{"checkpoint": one.path, "error": one.error} for one in self.refused]
        return {**document(self, "run", nbytes=self.nbytes), "checkpoints": checkpoints, "refused": refused}


def clean_run(
    path: str | os.PathLike[str],
    *,
    older_than_seconds: float = 86400.0,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> RunCleaning:
    """Remove orphaned files and unfinished uploads of all checkpoints at or below a path.

    Args:
        path: a local path or any fsspec URL.
        older_than_seconds: as in `clean`.
        dry_run: only report what would be removed.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Returns:
        What was removed in each directory, and which ones were refused.

    Raises:
        ConfigurationError: an option can't work or is unknown.
        CheckpointNotFoundError: no directory below the path holds files of ours.
        StorageError: the storage fails while the directory itself is listed.
    """
    check_age(older_than_seconds)
    with opened(path, storage_options) as filesystem:
        below, uploads, failed = filesystem.list_below()
        paths = [path_below.rpartition("/") for path_below in [*(file.name for file in below), *uploads]]
        folders = sorted({folder for folder, _, name in paths if own_file(name) or own_upload(name)})
        if not folders and not failed:
            raise nothing_below(filesystem)
    cleaned = []
    refused = [Refusal(filesystem.location(folder), str(error)) for folder, error in sorted(failed.items())]
    for folder in folders:
        at = f"{os.fspath(path).rstrip('/')}/{folder}" if folder else path
        try:
            one = clean(at, older_than_seconds=older_than_seconds, dry_run=dry_run, storage_options=storage_options)
            cleaned.append(one)
        except CheckpointError as error:
            refused.append(Refusal(filesystem.location(folder) if folder else filesystem.path, str(error)))
    return RunCleaning(filesystem.path, dry_run, float(older_than_seconds), tuple(cleaned), tuple(refused))
