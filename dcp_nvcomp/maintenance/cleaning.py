"""Remove what failed and killed saves left behind; safe while saves, loads and other cleanings run.

    clean_checkpoint(path) -> Cleaning        prints nothing: cli/clean.py does

What may go is a name that only this project gives, and gives once: `__<rank>_<n>_<id>.distcp`, `__<save_id>.metadata`,
the temporaries of a publish, and unfinished multipart uploads of these. Anything else is kept. Stock DCP's
`__<rank>_<n>.distcp` are kept too, although no root may name them: stock DCP uses these names again in each save, so
the file that is removed need not be the one that was looked at. They are counted as `foreign`.

1  list the files, then the unfinished uploads
2  read the roots: `.metadata`, and each `__<rank>.metadata`. All must be readable and all of their data files must be
   there, or nothing is done: in a damaged checkpoint an orphan may be what `recover` needs. If there is no root at all,
   as after a first save that died, each `__<save_id>.metadata` whose files are all there counts as one: `recover` could
   bring it back; if files are missing, nothing is done either. If there is no `.metadata`, a `.metadata.<id>.tmp` that
   was moved aside counts as one too. Then ask the storage for the time
3  an orphan is what no root names and what is older than `older_than`. Files with the same id belong to the same rank
   and save, and count as old as the youngest of them; and what a young `__<save_id>.metadata` names is as young as
   that (one that can't be read ends the cleaning)
4  list once more and read the roots once more, right before removing; what is live or young by now is kept
5  remove: temporaries and `__<save_id>.metadata` first, so that none of these ever names deleted files; then data
   files, some at a time with step 4 before each; then abort the uploads

Why nothing live is removed:

- A load, or a save that replaces the checkpoint: the files of `.metadata` as it is now are never touched. A save
  publishes before it removes what it replaced, so that at each moment some root names a whole checkpoint. If the roots
  change between 1 and 2, files seem to be missing; the roots are then read again.
- A save under way: no root names its files yet. They are young, if the save takes less than `older_than`, which is why
  that must be longer than the longest save. Once its `__<save_id>.metadata` is there, that protects the files of all
  its ranks, however old. A save whose files were removed all the same does not publish: after its
  `__<save_id>.metadata` it looks whether all files are there. What is left is a save longer than `older_than` whose
  `__<save_id>.metadata` and that look both fall between 4 and 5.
- What `recover` could bring back: if `.metadata` is damaged or misses files, this does nothing; if it is lost, a save
  that is complete is kept, and `recoverable` names it. A recovery between 2 and 5 is seen in 4.
- A first save under way, in a directory without any root: as any other save under way.
- A checkpoint that is being copied there, `.metadata` last: on local disks, files in a directory without any root are
  as young as their ctime, which no copying tool sets back.
- Another cleaning removes the same: a file that is missing already is fine.
- Ages are by the storage's own clock, so a machine whose clock is wrong does no harm. Files of unknown age are
  kept. (S3 counts from when an upload was begun, not from when it was completed.)
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    FileMismatchError,
    StorageError,
    UnsafeMetadataError,
    UnsafePathError,
)
from dcp_nvcomp.format.metadata.roots import Root, is_missing, read_root, read_roots, read_whole_temporary
from dcp_nvcomp.format.names import (
    METADATA_NAME,
    OwnFile,
    is_metadata_temporary,
    is_stock_data_file,
    own_file,
    own_upload,
    save_id_of_copy,
)
from dcp_nvcomp.maintenance.opening import opened
from dcp_nvcomp.storage.base import FileInfo, Filesystem, UnfinishedUpload

logger = logging.getLogger(__name__)

__all__ = ["MIN_AGE_SECONDS", "Cleaning", "Orphan", "check_age", "clean_checkpoint"]

MIN_AGE_SECONDS: Final = 3600.0
# Files that are removed after one look at the roots.
BATCH: Final = 1000
# How often the roots are read again if a save replaces them in between.
ATTEMPTS: Final = 5


@dataclass(frozen=True)
class Orphan:
    """Something that no checkpoint needs.

    Attributes:
        kind: `data`, `metadata` (an immutable copy), `temporary` or `upload`.
        name: the file; of an upload, the one it was to become.
        nbytes: its size; 0 for an upload, whose size is unknown.
        age_seconds: by the storage's clock, since it or what belongs to it was last written.
    """

    kind: str
    name: str
    nbytes: int
    age_seconds: float


@dataclass(frozen=True)
class Cleaning:
    """Result of `clean_checkpoint`.

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
        return {
            "schema": 1,
            "checkpoint": self.path,
            "dry_run": self.dry_run,
            "older_than_seconds": self.older_than_seconds,
            "nbytes": self.nbytes,
            "orphans": [
                {"kind": one.kind, "name": one.name, "nbytes": one.nbytes, "age_seconds": one.age_seconds}
                for one in self.orphans
            ],
            "young": self.young,
            "foreign": list(self.foreign),
            "recoverable": list(self.recoverable),
        }


def clean_checkpoint(
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
        found = _look(filesystem, older_than_seconds)
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


def check_age(older_than_seconds: float) -> None:
    """Raise ConfigurationError if files of this age may belong to a save under way."""
    if not isinstance(older_than_seconds, int | float) or not older_than_seconds >= MIN_AGE_SECONDS:
        raise ConfigurationError(f"older_than_seconds={older_than_seconds!r} must be at least {MIN_AGE_SECONDS:.0f}.")


@dataclass
class _Found:
    """One look at a directory."""

    orphans: list[Orphan]
    uploads: list[tuple[Orphan, UnfinishedUpload]]
    young: int
    foreign: list[str]
    recoverable: tuple[str, ...]


@dataclass(frozen=True)
class _Item:
    """A file or an upload with a name of ours."""

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


def _look(filesystem: Filesystem, older_than_seconds: float) -> _Found:
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
    items = [
        _Item(own, file.name, file.nbytes, math.inf if file.modified_seconds is None else file.modified_seconds)
        for file in files
        if (own := own_file(file.name)) is not None and file.name not in live
    ]
    items += [
        _Item(OwnFile("upload", own.file_id), upload.name, 0, upload.begun_seconds, upload)
        for upload in uploads
        if (own := own_upload(upload.name)) is not None
    ]
    written = _youngest(filesystem, items, now - older_than_seconds)
    foreign = [name for name in sizes if is_stock_data_file(name) and name not in live]
    found = _Found([], [], 0, foreign, recoverable)
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
    """Return the roots, all of whose files are there.

    Args:
        filesystem: the directory.
        sizes: what was listed before.
    """
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
    """Return each `.metadata.<id>.tmp` that `recover` could make `.metadata` of, and the names of doubtful ones.

    Args:
        filesystem: the directory.
        sizes: what was listed before.
        known: saves that need none, as their `__<save_id>.metadata` is there.
    """
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
        for name, file in root.files().items():
            nbytes = sizes.get(name)
            if nbytes is None or (file is not None and nbytes != file.nbytes):
                nbytes = filesystem.file_nbytes(name)  # newer than the listing, perhaps
            path = filesystem.location(name)
            advice = "Nothing was removed: run `dcp-nvcomp verify`; `recover` may need the orphans."
            if nbytes is None:
                return StorageError(f"{root.name} names a file that is missing. {advice}", path=path)
            if file is not None and nbytes != file.nbytes:
                return FileMismatchError(f"{root.name} says {file.nbytes} bytes, it has {nbytes}. {advice}", path=path)
    return None


def _youngest(filesystem: Filesystem, items: Sequence[_Item], limit_seconds: float) -> dict[_Item, float]:
    """Return, for each item, when the youngest of what belongs to it was written.

    Args:
        filesystem: the directory.
        items: the items.
        limit_seconds: what was written after this is young.
    """
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


def _remove(filesystem: Filesystem, older_than_seconds: float, found: _Found) -> Iterator[Orphan]:
    """Do steps 4 and 5, and yield what was removed."""
    metadata = [orphan for orphan in found.orphans if orphan.kind in ("metadata", "temporary")]
    data = [orphan for orphan in found.orphans if orphan.kind == "data"]
    batches = [metadata] + [data[start : start + BATCH] for start in range(0, len(data), BATCH)]
    for batch in batches:
        if batch:
            going = _still_orphans(filesystem, older_than_seconds, batch)
            filesystem.remove([orphan.name for orphan in going])
            yield from going
    if found.uploads:
        dead = {upload for _, upload in _look(filesystem, older_than_seconds).uploads}  # as with files
        going_uploads = [(orphan, upload) for orphan, upload in found.uploads if upload in dead]
        filesystem.abort_uploads([upload for _, upload in going_uploads])
        yield from (orphan for orphan, _ in going_uploads)


def _still_orphans(filesystem: Filesystem, older_than_seconds: float, batch: Sequence[Orphan]) -> list[Orphan]:
    """Return the orphans that still are: a save may have been published since, or be about to."""
    names = {orphan.name for orphan in _look(filesystem, older_than_seconds).orphans if orphan.kind != "upload"}
    return [orphan for orphan in batch if orphan.name in names]
