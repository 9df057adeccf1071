"""Look through a checkpoint's directory for what no root names: steps 1 to 3 of cleaning.py, which says why."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FileMismatchError,
    StorageError,
    UnsafeMetadataError,
    UnsafePathError,
)
from dcp_nvcomp.format.metadata.roots import Root, is_missing, read_root, read_roots, read_whole_temporary
from dcp_nvcomp.format.metadata.shares import needed_by_others
from dcp_nvcomp.format.names import (
    METADATA_NAME,
    OwnFile,
    is_metadata_temporary,
    is_stock_data_file,
    own_file,
    own_upload,
    save_id_of_copy,
)
from dcp_nvcomp.storage.base import BESIDE, FileInfo, Filesystem, UnfinishedUpload

logger = logging.getLogger(__name__)

# How often the roots are read again if a save replaces them in between.
ATTEMPTS: Final = 5


@dataclass(frozen=True)
class Orphan:
    """Something that no checkpoint needs."""

    kind: str  # `data`, `metadata` (an immutable copy), `temporary` or `upload`
    name: str  # the file; of an upload, the one it was to become
    nbytes: int  # its size; 0 for an upload, whose size is unknown
    age_seconds: float  # by the storage's clock, since it or what belongs to it was last written


@dataclass
class Found:
    """One look at a directory."""

    orphans: list[Orphan]
    uploads: list[tuple[Orphan, UnfinishedUpload]]
    young: int
    foreign: list[str]
    recoverable: tuple[str, ...]


@dataclass(frozen=True)
class _Item:
    own: OwnFile
    name: str
    nbytes: int
    seconds: float  # when it was written
    upload: UnfinishedUpload | None = None


def _uploads(filesystem: Filesystem) -> list[UnfinishedUpload]:
    """Return the unfinished uploads; none if the store, or these credentials, can't list them."""
    try:
        return filesystem.list_uploads()
    except StorageError as error:
        if error.attempts is None or error.outcome_unknown:
            raise
        logger.warning("Unfinished uploads were not looked for: %s", error)
        return []


def look(filesystem: Filesystem, older_than_seconds: float) -> Found:
    """Do steps 1 to 3."""
    files = filesystem.list_files()
    uploads = _uploads(filesystem)
    sizes = {file.name: file.nbytes for file in files}
    recoverable: tuple[str, ...] = ()
    doubtful: set[str] = set()
    try:
        roots = _whole_roots(filesystem, sizes)
    except CheckpointNotFoundError:
        if not any(map(own_file, sizes)) and not any(own_upload(upload.name) for upload in uploads):
            raise
        files = [_since_it_arrived(file) for file in files]
        roots = _whole_copies(filesystem, files, filesystem.now_seconds() - older_than_seconds)
        recoverable = tuple(str(root.save_id) for root in roots)
    if not any(root.name == METADATA_NAME for root in roots):
        known = {root.save_id for root in roots if save_id_of_copy(root.name)}
        aside, doubtful = _whole_temporaries(filesystem, sizes, known)
        roots += aside
        recoverable += tuple(root.own_save_id or root.name for root in aside)
    now = filesystem.now_seconds()
    live = set().union(*(root.names() for root in roots))
    # names are of one file only: made-up metadata may name one of this directory as if it were beside it
    live |= {name.rpartition("/")[2] for root in roots for name in root.files() if name.startswith(BESIDE)}
    needed = needed_by_others(filesystem, files)
    items = [
        _Item(own, file.name, file.nbytes, math.inf if file.modified_seconds is None else file.modified_seconds)
        for file in files
        if (own := own_file(file.name)) is not None and file.name not in live and file.name not in needed
    ]
    items += [
        _Item(OwnFile("upload", own.file_id), upload.name, 0, upload.begun_seconds, upload)
        for upload in uploads
        if (own := own_upload(upload.name)) is not None
    ]
    written = _youngest(filesystem, items, now - older_than_seconds)
    foreign = [name for name in sizes if is_stock_data_file(name) and name not in live]
    found = Found([], [], 0, foreign, recoverable)
    for item in items:
        age = now - written[item]
        if age <= older_than_seconds:
            found.young += 1
            continue
        if item.name in doubtful:
            continue
        orphan = Orphan(item.own.kind, item.name, item.nbytes, age)
        found.orphans.append(orphan)
        if item.upload is not None:
            found.uploads.append((orphan, item.upload))
    return found


def _whole_roots(filesystem: Filesystem, sizes: Mapping[str, int]) -> list[Root]:
    """Return the roots, all of whose files are there."""
    before: list[bytes] = []
    for _ in range(ATTEMPTS):
        roots = read_roots(filesystem, sizes)
        problem = _problem(filesystem, roots, sizes)
        now = [root.data for root in roots]
        if problem is None:
            return roots
        if now == before:  # not because a save replaced what was read first
            break
        before = now
    assert problem is not None
    raise problem


def _since_it_arrived(file: FileInfo) -> FileInfo:
    """Without a root this may be a copy in progress whose tool keeps the times of writing, as `cp -a` does."""
    if file.modified_seconds is None or file.changed_seconds is None:
        return file
    return dataclasses.replace(file, modified_seconds=max(file.modified_seconds, file.changed_seconds))


def _whole_copies(filesystem: Filesystem, files: Sequence[FileInfo], limit_seconds: float) -> list[Root]:
    """Return the `__<save_id>.metadata` all of whose files are there: what `recover` could make `.metadata` of.

    One that can't be read ends the cleaning, as it is not known which files it names. So does one that misses a file:
    a save that fails removes it before any of them, so the file was lost. A young one that misses a file only protects
    the others: its save, or a copy of the checkpoint, may be under way.
    """
    found = []
    sizes = {file.name: file.nbytes for file in files}
    for file in files:
        if save_id_of_copy(file.name) is None:
            continue
        try:
            root = read_root(filesystem, file.name)
        except CheckpointError as error:
            if is_missing(error):  # its save failed, or another cleaning was faster
                continue
            raise
        if root.save_id != save_id_of_copy(file.name):
            continue
        problem = _problem(filesystem, [root], sizes)
        if problem is None:
            found.append(root)
        elif file.modified_seconds is not None and file.modified_seconds < limit_seconds:
            raise problem
    return found


def _whole_temporaries(
    filesystem: Filesystem, sizes: Mapping[str, int], known: Collection[str | None]
) -> tuple[list[Root], set[str]]:
    """Return each `.metadata.<id>.tmp` that `recover` could make `.metadata` of, and the names of doubtful ones."""
    found, doubtful = [], set()
    for name in filter(is_metadata_temporary, sizes):
        try:
            root = read_whole_temporary(filesystem, name)
        except (UnsafeMetadataError, UnsafePathError):  # stock DCP's, perhaps, whose files are kept anyway
            doubtful.add(name)
            continue
        if root is None or (root.own_save_id is not None and root.own_save_id in known):
            continue
        if _problem(filesystem, [root], sizes) is None:
            found.append(root)
        else:
            doubtful.add(name)
    return found, doubtful


def _problem(filesystem: Filesystem, roots: Iterable[Root], sizes: Mapping[str, int]) -> CheckpointError | None:
    for root in roots:
        beside = [name for name in root.files() if name.startswith(BESIDE)]
        known = {**sizes, **dict(zip(beside, filesystem.map(filesystem.file_nbytes, beside), strict=True))}
        for name, file in root.files().items():
            nbytes = known.get(name)
            if nbytes is None or (file is not None and nbytes != file.nbytes):
                nbytes = filesystem.file_nbytes(name)  # newer than the listing, perhaps
            path = filesystem.location(name)
            advice = "Nothing was removed: run `dcp-nvcomp verify`; `recover` may need the orphans."
            if nbytes is None:
                return StorageError(f"{root.name} names a file that is missing. {advice}", path=path)
            if file is not None and nbytes != file.nbytes:
                return FileMismatchError(
                    f"The file has {nbytes} bytes; {root.name} says {file.nbytes}. {advice}", path=path
                )
    return None


def _youngest(filesystem: Filesystem, items: Sequence[_Item], limit_seconds: float) -> dict[_Item, float]:
    """Return, for each item, when the youngest of what belongs to it was written."""
    by_id: dict[str, float] = {}
    for item in items:
        by_id[item.own.file_id] = max(item.seconds, by_id.get(item.own.file_id, -math.inf))
    by_name: dict[str, float] = {}
    for item in items:
        if item.own.kind == "metadata" and by_id[item.own.file_id] >= limit_seconds:
            for name in _named_by_copy(filesystem, item.name):
                by_name[name] = max(by_id[item.own.file_id], by_name.get(name, -math.inf))
    return {
        item: max(by_id[item.own.file_id] if item.own.file_id else item.seconds, by_name.get(item.name, -math.inf))
        for item in items
    }


def _named_by_copy(filesystem: Filesystem, name: str) -> set[str]:
    """Return the files of a save that is about to be published, or was about to be."""
    try:
        return read_root(filesystem, name).names()
    except CheckpointError as error:
        if is_missing(error):  # its save failed, or another cleaning was faster
            return set()
        raise
