"""Remove what failed and killed saves left behind; safe while saves, loads and other cleanings run.

    clean_checkpoint(path) -> Cleaning        prints nothing: cli/clean.py does; steps 1 to 3 are in orphan_search.py

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
- What `recover` could bring back: if `.metadata` is corrupt or misses files, this does nothing; if it is lost, a save
  that is complete is kept, and `recoverable` names it. A recovery between 2 and 5 is seen in 4.
- A first save under way, in a directory without any root: as any other save under way.
- A checkpoint that is being copied there, `.metadata` last: on local disks, files in a directory without any root are
  as young as their ctime, which no copying tool sets back.
- Another cleaning removes the same: a file that is missing already is fine.
- Ages are by the storage's own clock, so a machine whose clock is wrong does no harm. Files of unknown age are
  kept. (S3 counts from when an upload was begun, not from when it was completed.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from dcp_nvcomp.format.recognition import recognize
from dcp_nvcomp.maintenance.opening import opened
from dcp_nvcomp.maintenance.orphan_search import Found, Orphan, look
from dcp_nvcomp.storage.base import Filesystem

MIN_AGE_SECONDS: Final = 3600.0
# Files that are removed after one look at the roots.
BATCH: Final = 1000


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
        dead = {upload for _, upload in look(filesystem, older_than_seconds).uploads}  # as with files
        going_uploads = [(orphan, upload) for orphan, upload in found.uploads if upload in dead]
        filesystem.abort_uploads([upload for _, upload in going_uploads])
        yield from (orphan for orphan, _ in going_uploads)


def _still_orphans(filesystem: Filesystem, older_than_seconds: float, batch: Sequence[Orphan]) -> list[Orphan]:
    """Return the orphans that still are: a save may have been published since, or be about to."""
    names = {orphan.name for orphan in look(filesystem, older_than_seconds).orphans if orphan.kind != "upload"}
    return [orphan for orphan in batch if orphan.name in names]
