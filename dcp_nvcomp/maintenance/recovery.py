"""Restore a checkpoint whose `.metadata` is lost or corrupt from its immutable `__<save_id>.metadata`.

A save that can't replace `.metadata` in one step moves it aside first, to `.metadata.<id>.tmp`. If it is interrupted
there, that file may be all that is left of a checkpoint of stock DCP, which has no immutable copy.

A lost `.metadata` is published so that it replaces nothing: if a save is faster, the save wins. A corrupt one is read
again right before it is replaced; a save that publishes between these two is replaced, and its own
`__<save_id>.metadata` and files are kept: do not recover while a save to the same path is running. `clean` never
removes what a recovery needs.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from dcp_nvcomp.calls.tables import Column, Shown, Table, left, local_time
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConcurrentSaveError,
    ConfigurationError,
    FormatError,
    StorageError,
    UnsafeMetadataError,
    UnsafePathError,
)
from dcp_nvcomp.format.data_file import DataFileRef, read_footer
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.roots import Root, is_missing, read_root, read_whole_temporary
from dcp_nvcomp.format.metadata.shares import end_removal, leave_marks
from dcp_nvcomp.format.names import (
    METADATA_NAME,
    copy_name_of,
    is_metadata_temporary,
    rank_of_metadata_name,
    save_id_of_copy,
)
from dcp_nvcomp.format.recognition import refused
from dcp_nvcomp.maintenance.opening import document, opened
from dcp_nvcomp.storage.base import FileInfo, Filesystem
from dcp_nvcomp.storage.open import real_place
from dcp_nvcomp.storage.reread import is_stored

RECOVERED = "recovered"
INTACT = "intact"
AMBIGUOUS = "ambiguous"
IMPOSSIBLE = "impossible"

_NOTHING = "There is nothing to recover."


@dataclass(frozen=True)
class Candidate:
    """A save that left an immutable metadata file, or a checkpoint whose `.metadata` was moved aside."""

    save_id: str  # its id; of a checkpoint of stock DCP, which has none, the name of the file that was moved aside
    name: str
    # when that was written, in seconds since 1970 by the storage's clock; None if unknown
    modified_seconds: float | None
    keys: int  # number of its keys; 0 if it can't be read
    nbytes: int  # size of its data files together
    problems: tuple[str, ...]  # what is missing or corrupt; empty if it is complete
    is_unread: bool = False  # True if the storage failed while it was looked at: it may be complete all the same

    @property
    def is_complete(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Recovery(Shown):
    """Result of `recover`.

    Attributes:
        path: the checkpoint.
        outcome: `recovered`: `.metadata` was published again. `intact`: it is good; if its copy was lost or
            differed, that was written again, or `reason` says why not. `ambiguous`: a save must be named, and nothing
            was done. `impossible`: no save is complete enough to be published again.
        save_id: the save that `.metadata` is of now; None if there is none, or stock DCP's.
        reason: what was wrong with `.metadata`, and, if nothing was done, why.
        candidates: the saves that were looked at, the latest first.
    """

    path: str
    outcome: str
    save_id: str | None
    reason: str
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return document(self, "checkpoint")

    def shown(self) -> Iterator[str | Table]:
        """Return what it prints: what was done, or the saves of which one must be named."""
        yield self.reason
        if self.outcome == RECOVERED:
            what = f"save {self.save_id}" if self.save_id is not None else "the checkpoint of stock DCP"
            yield f"Published {what} as .metadata again."
        elif self.candidates:
            rows = [
                (
                    one.save_id,
                    local_time(one.modified_seconds),
                    str(one.keys),
                    decimal(one.nbytes),
                    "; ".join(one.problems) or "complete",
                )
                for one in self.candidates
            ]
            yield Table(
                [left("save id"), Column("written", 2), Column("keys", 3), Column("size", 1), left("state")], rows
            )


@dataclass(frozen=True)
class _Current:
    """State of `.metadata`: can a load use it, and may only a named save replace it?"""

    is_good: bool
    must_be_named: bool
    what: str
    data: bytes | None
    save_id: str | None = None


def recover(
    path: str | os.PathLike[str], *, save_id: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> Recovery:
    """Restore a lost or corrupt `.metadata` from the copy of a complete save.

    Args:
        path: a local path or any fsspec URL.
        save_id: the save to restore, 32 hexadecimal digits, or the name of a `.metadata.<id>.tmp`; only needed if more
            than one could be meant.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Returns:
        What was done, or why nothing was. A good checkpoint is never replaced.

    Raises:
        ConfigurationError: `save_id` is not the id of a save, or an option is unknown.
        CheckpointNotFoundError: there is neither `.metadata` nor an immutable copy of one.
        CheckpointReplacedError: a checkpoint whose files the save shares is being removed.
        StorageError: the storage fails.
    """
    if save_id is not None and not is_save_id(save_id):
        raise ConfigurationError(f"save_id={save_id!r} must be 32 hexadecimal digits, or a `.metadata.<id>.tmp`.")
    with opened(path, storage_options) as filesystem:
        return _recover(filesystem, save_id)


def is_save_id(save_id: str) -> bool:
    """True if `recover` takes it for `save_id`."""
    return copy_name_of(save_id) is not None or is_metadata_temporary(save_id)


def _recover(filesystem: Filesystem, save_id: str | None) -> Recovery:
    def result(outcome: str, now: str | None, reason: str) -> Recovery:
        return Recovery(filesystem.path, outcome, now, reason, tuple(candidates))

    candidates: list[Candidate] = []
    files = filesystem.list_files()
    current = _look_at_current(filesystem, [file.name for file in files])
    if current.is_good:
        if save_id is None or save_id == current.save_id:
            return result(INTACT, current.save_id, f"{current.what} {_copy_again(filesystem, current)}")
        reason = f"{current.what} A good checkpoint is not replaced: move `.metadata` away first if it must be."
        return result(IMPOSSIBLE, current.save_id, reason)
    candidates += _candidates(filesystem, files, is_lost=current.data is None)
    if not candidates and current.data is None:
        raise refused(filesystem) or CheckpointNotFoundError(
            f"{current.what} There is no `__<save_id>.metadata` either to restore it from.", path=filesystem.path
        )
    is_unread = any(one.is_unread for one in candidates)  # which may be complete too, and later
    complete = [one for one in candidates if one.is_complete and save_id in (None, one.save_id, one.name)]
    if not complete:
        which = "No save here is complete" if save_id is None else f"Save {save_id} is not here, or not complete"
        return result(IMPOSSIBLE, None, f"{current.what} {which}.")
    if len(complete) > 1 or ((current.must_be_named or is_unread) and save_id is None):
        return result(AMBIGUOUS, None, f"{current.what} Name the save to restore.")
    root = _publish(filesystem, complete[0].name, current)
    return result(RECOVERED, root.own_save_id, current.what)


def _copy_again(filesystem: Filesystem, current: _Current) -> str:
    """Publish the immutable copy of a good `.metadata` again, where it is lost or another; return a sentence on it."""
    copy, data = copy_name_of(current.save_id), current.data
    assert data is not None
    if copy is None or None in read_root(filesystem, METADATA_NAME).files().values():
        return _NOTHING
    try:
        if is_stored(lambda: filesystem.read_all(copy, limit_nbytes=len(data) + 1), data):
            return _NOTHING
    except FormatError:  # it is longer
        pass
    except StorageError as error:
        if not is_missing(error):
            return _NOTHING
    try:
        filesystem.publish(copy, data)
    except StorageError as error:
        return f"{copy}, from which it could be recovered, is not there as it should be, and can't be: {error.message}"
    return f"{copy}, from which it can be recovered, was not there as it should be, and is again."


def _look_at_current(filesystem: Filesystem, names: Sequence[str]) -> _Current:
    """Return what a load would find. Raises if the storage, not the file, is at fault."""
    if filesystem.file_nbytes(METADATA_NAME) is None:
        if any(rank_of_metadata_name(name) is not None for name in names):
            return _Current(False, True, "`.metadata` is missing, but there is metadata of single ranks.", None)
        return _Current(False, False, "`.metadata` is missing.", None)
    try:
        root = read_root(filesystem, METADATA_NAME)
    except StorageError:
        raise
    except CheckpointError as error:
        data = filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES)
        what = f"`.metadata` can't be read: {error.message}"
        return _Current(False, isinstance(error, UnsafeMetadataError | UnsafePathError), what, data)
    problems, _ = _problems(filesystem, root)
    if problems:
        return _Current(False, True, f"`.metadata` can be read, but: {problems[0]}", root.data, root.save_id)
    return _Current(True, False, "`.metadata` can be read, and its files are there.", root.data, root.save_id)


def _candidates(filesystem: Filesystem, files: Sequence[FileInfo], *, is_lost: bool) -> list[Candidate]:
    latest_first = sorted(files, key=lambda file: (-(file.modified_seconds or 0), file.name))
    copies = [(file, save_id) for file in latest_first if (save_id := save_id_of_copy(file.name)) is not None]
    found = [one for file, save_id in copies if (one := _candidate(filesystem, file, save_id)) is not None]
    if is_lost:
        for file in latest_first:
            aside = _candidate(filesystem, file, None) if is_metadata_temporary(file.name) else None
            if aside is not None and not any(one.save_id == aside.save_id and one.is_complete for one in found):
                found.append(aside)
    return found


def _candidate(filesystem: Filesystem, file: FileInfo, save_id: str | None) -> Candidate | None:
    """Return what a copy holds, or what was moved aside; None if that is only the torn beginning of it."""
    try:
        root = (read_whole_temporary if save_id is None else read_root)(filesystem, file.name)
    except CheckpointError as error:
        problem = f"{file.name} can't be read: {error.message}"
        return Candidate(save_id or file.name, file.name, file.modified_seconds, 0, 0, (problem,), _is_trouble(error))
    if root is None:
        return None
    problems, is_unread = _problems(filesystem, root)
    if save_id is not None and root.save_id != save_id:
        problems.insert(0, f"{file.name} is of another save, {root.save_id}.")
    return Candidate(
        save_id or root.own_save_id or file.name,
        file.name,
        file.modified_seconds,
        len(root.metadata.state_dict_metadata),
        sum(one.nbytes for one in root.files().values() if one is not None),
        tuple(problems),
        is_unread,
    )


def _is_trouble(error: CheckpointError) -> bool:
    """Return True if the storage is at fault, and not what it holds."""
    return isinstance(error, StorageError) and not is_missing(error)


def _problems(filesystem: Filesystem, root: Root) -> tuple[list[str], bool]:
    """Return what is wrong with the files that a metadata file names, and True if the storage failed."""
    trouble: list[CheckpointError] = []

    def problem(item: tuple[str, DataFileRef | None]) -> str | None:
        name, file = item
        try:
            if file is not None:
                read_footer(filesystem, file)
            elif filesystem.file_nbytes(name) is None:
                return f"{name} is missing."
        except CheckpointError as error:
            trouble.extend([error] if _is_trouble(error) else [])
            return f"{name}: {error.message}"
        return None

    found = filesystem.map(problem, sorted(root.files().items()))
    return [one for one in found if one is not None], bool(trouble)


def _publish(filesystem: Filesystem, name: str, current: _Current) -> Root:
    root = read_root(filesystem, name)
    data = root.data
    # those of the save may be gone: without metadata they count for an hour
    leave_marks(filesystem, posixpath.basename(real_place(filesystem.path)), root.files(), root.save_id or "")
    end_removal(filesystem)
    if current.data is not None:
        if filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES) != current.data:
            message = "Another save was published in the meantime. Nothing was changed."
            raise ConcurrentSaveError(message, path=filesystem.location(METADATA_NAME))
        filesystem.publish(METADATA_NAME, data)
    else:
        filesystem.publish(METADATA_NAME, data, overwrite=False)
    return root
