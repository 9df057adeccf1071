"""List the checkpoints below a directory: a run that keeps one directory per step.

The files are listed once. A checkpoint is opened the first time that it is seen (completeness.py). Of one that was
complete then, and is as it was by its listing (`Seen`), only the summary at the end of `.metadata` is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from rich.filesize import decimal

from dcp_nvcomp.calls.tables import Column, Shown, Table, left, local_time
from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.format.metadata.summary import REPLICA, SUMMARY_NBYTES, Summary, summary_at_end
from dcp_nvcomp.format.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
    data_file_rank,
    marking_directory,
    own_file,
    own_upload,
    rank_of_metadata_name,
    shared_directories,
    step_in,
)
from dcp_nvcomp.maintenance.completeness import Opened, Seen, identity_of, look_into, read_seen
from dcp_nvcomp.maintenance.opening import document, natural_order, nothing_below, opened
from dcp_nvcomp.storage.base import FileInfo, Filesystem, RecursiveListing

COMPLETE: Final = "complete"
INCOMPLETE: Final = "incomplete"
DAMAGED: Final = "damaged"
MISNAMED: Final = "misnamed"

_LARGE_NBYTES: Final = 64 << 20  # of metadata: such are parsed one at a time
_IN_SUMMARY: Final = (
    *("stored_nbytes", "uncompressed_nbytes", "shared_nbytes", "ranks", "keys", "save_id", "metrics", "run_seconds"),
    "lease",
)


@dataclass(frozen=True)
class Step:
    """One checkpoint of a run."""

    name: str  # its path below the run; empty for a checkpoint at the run's own path
    step: int | None  # the step that a run saved it for; else the number at the end of its name, None if there is none
    state: str
    saved_seconds: float | None  # by the clock of the storage; a copy is younger than what it was made of
    stored_nbytes: int  # size of its data files
    ranks: int  # how many ranks wrote it; by the names of the files if there is no summary
    # of the state in memory; this and the next two are None if the checkpoint has no summary, as stock DCP's
    uncompressed_nbytes: int | None = None
    keys: int | None = None
    save_id: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of that step, if a run saved it with any
    replica_id: str = ""  # what it has in common with what other replicas of the state saved; empty if there are none
    problem: str = ""  # why it is damaged or misnamed; empty if it is not
    # how long the run had been under way, without breaks; None if the step does not say
    run_seconds: float | None = None
    committed_seconds: float | None = None  # by the clock of the rank that published it; None without a summary
    lease: int = 0  # which of the run's managers saved it, counted by their leases; 0 if the step does not say
    shares: tuple[str, ...] = ()  # the directories beside it whose data files it needs too
    shared_nbytes: int = 0  # size in memory of what is in these
    error: StorageError | None = None  # that of the storage, if it kept what is above from being known

    @property
    def ratio(self) -> float | None:
        nbytes = (self.uncompressed_nbytes or 0) - self.shared_nbytes
        return nbytes / self.stored_nbytes if nbytes and self.stored_nbytes else None

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name not in ("replica_id", "lease", "error")}
        # JSON has no NaN
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()}
        return {**values, "ratio": self.ratio, "metrics": metrics}


@dataclass(frozen=True)
class RunListing(Shown):
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
        return {**document(self, "run"), "steps": [step.to_json() for step in self.steps]}

    def shown(self, kept: Mapping[int, Iterable[str]] = MappingProxyType({})) -> Iterator[str | Table]:
        """Return what it prints; with `kept`, why each step is kept."""
        columns = [
            left("checkpoint"), left("saved", 2), Column("before", 5), Column("size", 1), Column("ratio", 3),
            Column("ranks", 4), Column("keys", 6), left("state"),
        ]  # fmt: skip
        rows = [
            [
                step.name or ".",
                local_time(step.saved_seconds if step.committed_seconds is None else step.committed_seconds),
                "-" if step.uncompressed_nbytes is None else decimal(step.uncompressed_nbytes),
                decimal(step.stored_nbytes),
                "-" if step.ratio is None else f"{step.ratio:.3f}",
                str(step.ranks),
                "-" if step.keys is None else str(step.keys),
                step.state,
            ]
            for step in self.steps
        ]
        if any(step.shares for step in self.steps):
            columns.append(left("shares", 9))
            for row, step in zip(rows, self.steps, strict=True):
                row.append(", ".join(step.shares))
        if any(step.metrics for step in self.steps):
            columns.append(left("metrics", 7))
            for row, step in zip(rows, self.steps, strict=True):
                row.append(", ".join(f"{name} {value:.6g}" for name, value in step.metrics.items()))
        if kept:
            columns.append(left("kept", 8))
            for row, step in zip(rows, self.steps, strict=True):
                row.append(", ".join(() if step.step is None else kept.get(step.step, ())))
        yield Table(columns, rows)
        for step in self.steps:
            if step.problem:
                yield f"{step.name or '.'} is {step.state}: {step.problem}"
        for path, error in self.failed.items():
            yield f"{path} could not be listed: {error}"


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
        steps = steps_below(filesystem, below, seen=read_seen(filesystem, below))
        if not steps and not below.failed:
            raise nothing_below(filesystem)
        return RunListing(filesystem.path, tuple(steps), {name: str(error) for name, error in below.failed.items()})


def steps_below(
    filesystem: Filesystem,
    below: RecursiveListing,
    *,
    seen: Seen[Step],
    step_of: Callable[[str], int | None] | None = None,
) -> list[Step]:
    """Return the checkpoints among what is below a directory, in natural order of their names."""
    folders: dict[str, list[FileInfo]] = {}
    for file in below.files:
        folders.setdefault(file.name.rpartition("/")[0], []).append(file)
    for upload in below.uploads:
        folder, _, name = upload.rpartition("/")
        if own_upload(name):
            folders.setdefault(folder, [])
    found = {folder: files for folder, files in folders.items() if _is_checkpoint(files, folder, below.uploads)}
    order = sorted(found, key=natural_order)
    look = _Look(filesystem, {file.name: file.nbytes for file in below.files}, seen, step_of or _step_of_default)
    shared = _shared_files(folders)
    return filesystem.map(lambda folder: look.at(folder, found[folder], shared.get(folder, [])), order)


def _shared_files(folders: Mapping[str, list[FileInfo]]) -> dict[str, list[FileInfo]]:
    """Return the data files of other checkpoints that each one may need, by their marks."""
    found: dict[str, list[FileInfo]] = {}
    for folder, files in folders.items():
        parent, slash, _ = folder.rpartition("/")
        for name in _names(files):
            sharing = marking_directory(name)
            if sharing is not None:
                data = [file for file in files if file.name.endswith(DATA_FILE_SUFFIX)]
                found.setdefault(f"{parent}{slash}{sharing}", []).extend(data)
    return found


def _step_of_default(name: str) -> int | None:
    return step_in(name, "step-")


def _names(files: Iterable[FileInfo]) -> list[str]:
    return [file.name.rpartition("/")[2] for file in files]


def _is_checkpoint(files: Iterable[FileInfo], folder: str, uploads: Iterable[str]) -> bool:
    names = _names(files)
    if any(name == METADATA_NAME or rank_of_metadata_name(name) is not None or own_file(name) for name in names):
        return True
    return not names and any(upload.rpartition("/")[0] == folder for upload in uploads)


class _Look:
    def __init__(
        self, filesystem: Filesystem, sizes: Mapping[str, int], seen: Seen[Step], step_of: Callable[[str], int | None]
    ) -> None:
        self._filesystem, self._sizes, self._seen, self._step_of = filesystem, sizes, seen, step_of
        self._one_large = threading.Lock()

    def at(self, folder: str, files: list[FileInfo], shared: list[FileInfo]) -> Step:
        identity = identity_of([*files, *shared])
        known = self._seen.step(folder, identity)
        if known is not None:
            return known
        by_name = {file.name.rpartition("/")[2]: file for file in files}
        ranks = [name for name in by_name if rank_of_metadata_name(name) is not None]
        roots = [METADATA_NAME] if METADATA_NAME in by_name else sorted(ranks)
        found = self._known(folder, identity, by_name) or self._opened(folder, roots, by_name)
        step = self._step(folder, by_name, roots, found.summary, found.problem)
        if found.summary is None and found.error is not None:
            step = replace(step, error=found.error)
        if step.state == COMPLETE:
            self._seen.note(folder, identity, step)
        return step

    def _opened(self, folder: str, roots: list[str], by_name: Mapping[str, FileInfo]) -> Opened:
        if not roots:
            return Opened(None)
        is_large = any(by_name[name].nbytes > _LARGE_NBYTES for name in roots)
        with self._one_large if is_large else contextlib.nullcontext():
            return look_into(self._filesystem, folder, roots, self._sizes)

    def _known(self, folder: str, identity: str | None, by_name: Mapping[str, FileInfo]) -> Opened | None:
        """Return the summary of a checkpoint that was seen complete; None for others, and if it can't be read now.

        Without its summary a step would seem to have no metrics, by which rules keep the best.
        """
        root = by_name.get(METADATA_NAME)
        if not self._seen.has(folder, identity):
            return None
        if root is None:
            return Opened(None)
        start = max(root.nbytes - SUMMARY_NBYTES, 0)
        try:
            return Opened(summary_at_end(self._filesystem.read(root.name, start, root.nbytes)))
        except CheckpointError:  # it may have been replaced or removed since it was listed
            return None

    def _step(
        self, folder: str, by_name: Mapping[str, FileInfo], roots: list[str], summary: Summary | None, problem: str
    ) -> Step:
        data = {name: file for name, file in by_name.items() if data_file_rank(name) is not None}
        saved = None if summary is None else summary.step
        promised = self._step_of(folder.rpartition("/")[2])
        state = (DAMAGED if problem else COMPLETE) if roots else INCOMPLETE
        if saved is not None and promised is not None and saved != promised:
            state, problem = MISNAMED, f"It holds step {saved}, and has the name of step {promised}."
        root = by_name.get(METADATA_NAME)
        written = [file.modified_seconds for file in ([root] if root else by_name.values())]
        number = re.search(r"([0-9]+)$", folder)
        in_name = int(number[1]) if number else None
        found = Step(
            name=folder,
            step=saved if saved is not None and state != MISNAMED else in_name,
            state=state,
            saved_seconds=max((seconds for seconds in written if seconds is not None), default=None),
            stored_nbytes=sum(file.nbytes for file in data.values()),
            ranks=len({data_file_rank(name) for name in data}),
            problem=problem,
        )
        if summary is None:
            return found
        known = {name: getattr(summary, name) for name in _IN_SUMMARY}
        replica_id, committed = str(summary.more.get(REPLICA, "")), summary.saved_seconds
        shares = summary.shares if summary.shares is not None else self._shares(folder)
        return replace(found, **known, replica_id=replica_id, committed_seconds=committed, shares=shares)

    def _shares(self, folder: str) -> tuple[str, ...]:
        from dcp_nvcomp.format.metadata.roots import read_root  # takes torch, and that seconds

        name = f"{folder}/{METADATA_NAME}" if folder else METADATA_NAME
        return tuple(shared_directories(read_root(self._filesystem, name).files()))
