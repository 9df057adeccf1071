"""Whether a checkpoint is complete: one answer for lists, rules, restores, pins and uploads; and which were found so.

A checkpoint is complete if its `.metadata` parses, its summary is of the same save, and its data files are there, as
long as they must be. Of most of our own that is known without parsing: a `.metadata` whose CRC is right is as it was
published, and what is published parses.

    .run/seen     {"schema": 1, "complete": {"<directory>": "<identity of its listing>"}}

has those of a run that were found complete, so that they need not be opened for each list. The identity is a hash of
the names, sizes and times of all files of a checkpoint, and of the data files beside it that it shares. Nothing but
time depends on this file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.summary import SUMMARY_NBYTES, Summary, end_of_pickle, has_trailer, summary_at_end
from dcp_nvcomp.format.names import DATA_FILE_SUFFIX, METADATA_NAME, marking_directory
from dcp_nvcomp.storage.base import BESIDE, FileInfo, Filesystem, RecursiveListing

if TYPE_CHECKING:
    from dcp_nvcomp.format.metadata.roots import Root

T = TypeVar("T")
_DATA_NAME: Final = re.compile(rb"__[0-9]+_[0-9]+_[0-9a-f]{32}\.distcp")
RUN_FOLDER: Final = ".run"
SEEN_NAME: Final = "seen"
_MOST_NBYTES: Final = 64 << 20


class Opened(NamedTuple):
    """What opening a checkpoint has shown."""

    summary: Summary | None
    problem: str = ""  # why it is not complete; empty if it is
    error: StorageError | None = None  # that of the storage, if it kept the metadata from being read


def look_into(filesystem: Filesystem, folder: str, roots: Iterable[str], sizes: Mapping[str, int]) -> Opened:
    """Read the metadata of a checkpoint, and compare it with what is there."""
    below = f"{folder}/" if folder else ""
    summary = None
    for name in roots:
        if name == METADATA_NAME:
            summary = _plainly_whole(filesystem, below, sizes)
            if summary is not None:
                return Opened(summary)
        from dcp_nvcomp.format.metadata.roots import is_missing, read_root  # takes torch, and that seconds

        try:
            root = read_root(filesystem, f"{below}{name}")
        except CheckpointError as error:
            if is_missing(error):
                return Opened(None, f"{name} was removed meanwhile.")
            trouble = error if isinstance(error, StorageError) else None
            return Opened(_summary_alone(filesystem, f"{below}{name}", sizes), f"{name}: {error.message}", trouble)
        summary = summary_at_end(root.data[-SUMMARY_NBYTES:])
        problem = _disagreement(root, summary) or _lacking(filesystem, root, folder, sizes)
        if problem:
            return Opened(summary, problem)
    return Opened(summary)


def _plainly_whole(filesystem: Filesystem, below: str, sizes: Mapping[str, int]) -> Summary | None:
    """Return the summary of our checkpoint if it is complete and has no other data files; None if it must be parsed."""
    try:
        data = filesystem.read_all(f"{below}{METADATA_NAME}", limit_nbytes=MAX_METADATA_NBYTES)
        summary = summary_at_end(data[-SUMMARY_NBYTES:])
        if summary is None or not has_trailer(data):
            return None
        end = end_of_pickle(data)
    except CheckpointError:
        return None
    named = {name.decode() for name in _DATA_NAME.findall(data, 0, end)}
    there = {
        name.removeprefix(below): nbytes
        for name, nbytes in sizes.items()
        if name.startswith(below) and name.endswith(DATA_FILE_SUFFIX)
    }
    return summary if named == there.keys() and sum(there.values()) == summary.stored_nbytes else None


def _summary_alone(filesystem: Filesystem, name: str, sizes: Mapping[str, int]) -> Summary | None:
    """Return the summary of metadata that can't be read otherwise."""
    nbytes = sizes.get(name, 0)
    try:
        return summary_at_end(filesystem.read(name, max(nbytes - SUMMARY_NBYTES, 0), nbytes))
    except CheckpointError:
        return None


def _disagreement(root: Root, summary: Summary | None) -> str:
    if summary is None or summary.save_id == root.save_id:
        return ""
    return f"The summary in its metadata is of save {summary.save_id}, and the rest of save {root.save_id}."


def _lacking(filesystem: Filesystem, root: Root, folder: str, sizes: Mapping[str, int]) -> str:
    """Return what is wrong with the data files; empty if nothing is."""
    least, files = _least_sizes(root), root.files()
    places = {name: posixpath.normpath(f"{folder}/{name}") if folder else name for name in files}
    unlisted = [name for name in files if name.startswith(BESIDE) and places[name] not in sizes]
    beside = dict(
        zip(unlisted, filesystem.map(lambda name: filesystem.file_nbytes(places[name]), unlisted), strict=True)
    )
    for name, file in files.items():
        nbytes = beside[name] if name in beside else sizes.get(places[name])
        if nbytes is None:
            return f"The data file {name} is missing."
        if file is not None and nbytes != file.nbytes:
            return f"The data file {name} has {nbytes} bytes, and the metadata says {file.nbytes}."
        if nbytes < least.get(name, 0):
            return f"The data file {name} has {nbytes} bytes, and what it should hold takes {least[name]}."
    return ""


def _least_sizes(root: Root) -> dict[str, int]:
    """Return how long the data files of stock DCP are at least."""
    from dcp_nvcomp.format.metadata.shards import StockItem

    found: dict[str, int] = {}
    for item in (root.metadata.storage_data or {}).values():
        if isinstance(item, StockItem):
            found[item.relative_path] = max(found.get(item.relative_path, 0), item.offset + item.length)
    return found


class Seen(Generic[T]):
    """Checkpoints that were complete when they were opened, and what was found in them."""

    def __init__(self, identities: Mapping[str, str] | None = None) -> None:
        self._identities = dict(identities or {})
        self._steps: dict[str, T] = {}  # what this process has opened itself

    def has(self, folder: str, identity: str | None) -> bool:
        """Return whether a checkpoint was complete, and is as it was then."""
        return identity is not None and self._identities.get(folder) == identity

    def step(self, folder: str, identity: str | None) -> T | None:
        """Return what this process found in a checkpoint that is as it was; None if it has to look."""
        return self._steps.get(folder) if self.has(folder, identity) else None

    def note(self, folder: str, identity: str | None, step: T) -> None:
        """Note that a checkpoint is complete; without an identity nothing is noted."""
        if identity is not None:
            self._steps[folder] = step
            self._identities[folder] = identity

    def forget(self, folder: str) -> None:
        self._identities.pop(folder, None)

    def keep(self, folders: Collection[str]) -> None:
        """Forget all other checkpoints: they are gone."""
        for folder in self._identities.keys() - set(folders):
            self.forget(folder)
            self._steps.pop(folder, None)

    def to_bytes(self) -> bytes:
        return json.dumps({"schema": 1, "complete": dict(sorted(self._identities.items()))}).encode()


def identity_of(files: Iterable[FileInfo]) -> str | None:
    """Return the identity of a checkpoint's listing; None if the storage does not tell when files were written."""
    named = [(file.name.rpartition("/")[2], file) for file in files]
    rows = sorted(
        (name, file.nbytes, file.modified_seconds, file.changed_seconds)
        for name, file in named
        if marking_directory(name) is None  # others come and go
    )
    if any(modified is None for _, _, modified, _ in rows):
        return None
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def read_seen(filesystem: Filesystem, below: RecursiveListing) -> Seen[T]:
    """Return what is known of the checkpoints below a directory; nothing where it can't be read."""
    found: dict[str, str] = {}
    for file in below.files:
        folder, _, name = file.name.rpartition("/")
        run, _, own = folder.rpartition("/")
        if name != SEEN_NAME or own != RUN_FOLDER:
            continue
        try:
            document = parse_json(filesystem.read_all(file.name, limit_nbytes=_MOST_NBYTES))
            known = document["complete"].items()
            found |= {f"{run}/{step}" if run else step: str(identity) for step, identity in known}
        except (CheckpointError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return Seen(found)
