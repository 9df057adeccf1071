"""List the checkpoints below a directory: a run that keeps one directory per step.

    list_run(path) -> RunListing        prints nothing: cli/ls.py does

The files are listed once, and of each `.metadata` the last few KB are read, where its summary is; none is parsed. So a
thousand checkpoints on an object store take a thousand small reads, many at once, and one listing a thousand files.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.metadata.summary import REPLICA, SUMMARY_NBYTES, Summary, summary_at_end
from dcp_nvcomp.format.names import METADATA_NAME, data_file_rank, own_file, own_upload, rank_of_metadata_name
from dcp_nvcomp.maintenance.natural import natural_order
from dcp_nvcomp.maintenance.opening import nothing_below, opened
from dcp_nvcomp.storage.base import Below, FileInfo, Filesystem

__all__ = ["COMPLETE", "DAMAGED", "INCOMPLETE", "RunListing", "Step", "list_run", "steps_below"]

COMPLETE = "complete"
INCOMPLETE = "incomplete"
DAMAGED = "damaged"


@dataclass(frozen=True)
class Step:
    """One checkpoint of a run.

    Attributes:
        name: its path below the run; empty for a checkpoint at the run's own path.
        step: the step that a run saved it for; else the number at the end of its name, None if there is none.
        state: `complete`; `incomplete`: data files without `.metadata`, of a save that died or is under way; `damaged`:
            the data files together are shorter than they must be, there are none, or `.metadata` is empty. `verify`
            finds what this can't, such as files whose place an orphan of another save has taken.
        saved_seconds: when its `.metadata` was written, else its last file, in seconds since 1970 by the storage's
            clock; None if the storage does not tell.
        stored_nbytes: size of its data files.
        uncompressed_nbytes: size of the state in memory; None if the checkpoint has no summary, as stock DCP's.
        ranks: how many ranks wrote it; by the names of the files if there is no summary.
        keys: number of keys; None without a summary.
        save_id: id of the save; None without a summary.
        metrics: of that step, if a run saved it with any.
        replica_id: what it has in common with what other replicas of the state saved; empty if there are none.
    """

    name: str
    step: int | None
    state: str
    saved_seconds: float | None
    stored_nbytes: int
    uncompressed_nbytes: int | None
    ranks: int
    keys: int | None
    save_id: str | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    replica_id: str = ""

    @property
    def ratio(self) -> float | None:
        """Uncompressed over stored size; None if it is not known."""
        return (
            self.uncompressed_nbytes / self.stored_nbytes if self.uncompressed_nbytes and self.stored_nbytes else None
        )

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "name": self.name,
            "step": self.step,
            "state": self.state,
            "saved_seconds": self.saved_seconds,
            "stored_nbytes": self.stored_nbytes,
            "uncompressed_nbytes": self.uncompressed_nbytes,
            "ratio": self.ratio,
            "ranks": self.ranks,
            "keys": self.keys,
            "save_id": self.save_id,
            # JSON has no NaN
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()},
        }


@dataclass(frozen=True)
class RunListing:
    """Result of `list_run`.

    Attributes:
        path: the run.
        steps: its checkpoints, in natural order of their names.
        failed: why folders could not be listed, by path.
    """

    path: str
    steps: tuple[Step, ...]
    failed: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return {
            "schema": 1,
            "run": self.path,
            "steps": [step.to_json() for step in self.steps],
            "failed": dict(self.failed),
        }


def list_run(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> RunListing:
    """Return the checkpoints at and below a path, of this package and of stock DCP.

    Args:
        path: a local path or any fsspec URL.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Raises:
        ConfigurationError: an option is unknown.
        CheckpointNotFoundError: there is no checkpoint.
        StorageError: the storage fails.
    """
    with opened(path, storage_options) as filesystem:
        below = filesystem.list_below()
        steps = steps_below(filesystem, below)
        if not steps and not below.failed:
            raise nothing_below(filesystem)
        return RunListing(filesystem.path, tuple(steps), {name: str(error) for name, error in below.failed.items()})


def steps_below(filesystem: Filesystem, below: Below) -> list[Step]:
    """Return the checkpoints among what is below a directory, in natural order of their names.

    Args:
        filesystem: the directory.
        below: what is below it.

    Raises:
        StorageError: the storage fails.
    """
    folders: dict[str, list[FileInfo]] = {}
    for file in below.files:
        folders.setdefault(file.name.rpartition("/")[0], []).append(file)
    for upload in below.uploads:
        folder, _, name = upload.rpartition("/")
        if own_upload(name):
            folders.setdefault(folder, [])
    found = {folder: files for folder, files in folders.items() if _is_checkpoint(files, folder, below.uploads)}
    order = sorted(found, key=natural_order)
    return filesystem.map(lambda folder: _step(filesystem, folder, found[folder]), order)


def _names(files: Iterable[FileInfo]) -> list[str]:
    return [file.name.rpartition("/")[2] for file in files]


def _is_checkpoint(files: Iterable[FileInfo], folder: str, uploads: Iterable[str]) -> bool:
    names = _names(files)
    if any(name == METADATA_NAME or rank_of_metadata_name(name) is not None or own_file(name) for name in names):
        return True
    return not names and any(upload.rpartition("/")[0] == folder for upload in uploads)


def _step(filesystem: Filesystem, folder: str, files: list[FileInfo]) -> Step:
    by_name = {file.name.rpartition("/")[2]: file for file in files}
    root = by_name.get(METADATA_NAME)
    data = {name: file for name, file in by_name.items() if data_file_rank(name) is not None}
    summary = None if root is None else _summary(filesystem, root)
    present_nbytes = sum(file.nbytes for file in data.values())
    state = COMPLETE if root or any(rank_of_metadata_name(name) is not None for name in by_name) else INCOMPLETE
    # each rank's files have an id of its own, so those of this save can't be told from orphans
    if root is not None and (present_nbytes < summary.stored_nbytes if summary else not (root.nbytes and data)):
        state = DAMAGED
    times = [file.modified_seconds for file in ([root] if root else files) if file.modified_seconds is not None]
    number = re.search(r"([0-9]+)$", folder)
    in_name = int(number[1]) if number else None
    return Step(
        folder,
        in_name if summary is None or summary.step is None else summary.step,
        state,
        max(times, default=None),
        present_nbytes if summary is None else summary.stored_nbytes,
        None if summary is None else summary.uncompressed_nbytes,
        len({data_file_rank(name) for name in data}) if summary is None else summary.ranks,
        None if summary is None else summary.keys,
        None if summary is None else summary.save_id,
        {} if summary is None else summary.metrics,
        "" if summary is None else str(summary.more.get(REPLICA, "")),
    )


def _summary(filesystem: Filesystem, root: FileInfo) -> Summary | None:
    start = max(root.nbytes - SUMMARY_NBYTES, 0)
    try:
        return summary_at_end(filesystem.read(root.name, start, root.nbytes))
    except CheckpointError:  # replaced or removed since it was listed
        return None
