"""Clean every checkpoint below a directory: a run that keeps one directory per step.

    clean_run(path) -> RunCleaning        prints nothing: cli/clean.py does

Each directory that holds files of ours is judged by itself, as `clean_checkpoint` does (cleaning.py): one that is
corrupt is left alone and reported, and the others are cleaned.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.names import own_file, own_upload
from dcp_nvcomp.maintenance.cleaning import Cleaning, check_age, clean_checkpoint
from dcp_nvcomp.maintenance.opening import nothing_below, opened


@dataclass(frozen=True)
class Refusal:
    """A checkpoint in which nothing was removed.

    Attributes:
        path: the checkpoint.
        error: why, in one line.
    """

    path: str
    error: str


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
        return {
            "schema": 1,
            "run": self.path,
            "dry_run": self.dry_run,
            "older_than_seconds": self.older_than_seconds,
            "nbytes": self.nbytes,
            "checkpoints": [one.to_json() for one in self.checkpoints],
            "refused": [{"checkpoint": one.path, "error": one.error} for one in self.refused],
        }


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
        older_than_seconds: as in `clean_checkpoint`.
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
            one = clean_checkpoint(
                at, older_than_seconds=older_than_seconds, dry_run=dry_run, storage_options=storage_options
            )
            cleaned.append(one)
        except CheckpointError as error:
            refused.append(Refusal(filesystem.location(folder) if folder else filesystem.path, str(error)))
    return RunCleaning(filesystem.path, dry_run, float(older_than_seconds), tuple(cleaned), tuple(refused))
