"""The metadata files that say which data files of a directory are live, and the names that a save gives to its files.

A root is `.metadata`, ours or stock DCP's, or the `__<rank>.metadata` of a save with `use_collectives=False`. The
immutable `__<save_id>.metadata` is not a root: it is a backup used only by `recover`.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IncompleteCheckpointError,
    MetadataError,
    StorageError,
    UnsafeMetadataError,
    UnsafePathError,
)
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.metadata.shards import StoredAt
from dcp_nvcomp.format.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
    copy_name_of,
    rank_of_metadata_name,
    save_id_of_copy,
)
from dcp_nvcomp.format.recognition import refused
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.reread import reread

_USUAL_NBYTES: Final = 64 << 20
_PICKLE: Final = pickle.PROTO


@dataclass(frozen=True)
class Root:
    """One metadata file as it was read."""

    name: str
    data: bytes = field(repr=False)
    metadata: Metadata = field(repr=False)

    @property
    def save_id(self) -> str | None:
        """The save it is of; None if the metadata does not say."""
        meta = self.metadata.storage_meta
        return meta.save_id if meta is not None else None

    @property
    def own_save_id(self) -> str | None:
        """The save it is of, None if it is not one of this package: stock DCP has ids of another form."""
        return self.save_id if copy_name_of(self.save_id) is not None else None

    def files(self) -> dict[str, DataFileRef | None]:
        """Return the data files that it names; None for a file of stock DCP, whose size is not recorded."""
        found: dict[str, DataFileRef | None] = {}
        for value in (self.metadata.storage_data or {}).values():
            if isinstance(value, StoredAt):
                found[value.file.name] = value.file
            else:
                found[value.relative_path] = None
        return found

    def names(self) -> set[str]:
        """Return every file of this directory that belongs to it: metadata is untrusted, and these may be removed."""
        data_files = {name for name in self.files() if name.endswith(DATA_FILE_SUFFIX) and "/" not in name}
        copy = copy_name_of(self.save_id)
        return {self.name, *data_files, *([copy] if copy else [])}


def is_missing(error: CheckpointError) -> bool:
    """True if a file is missing; NFS reports ESTALE for one that another machine removed."""
    return isinstance(error, StorageError) and error.errno in (errno.ENOENT, errno.ESTALE)


def read_root(
    filesystem: Filesystem, name: str, *, trusted_globals: Sequence[str] = (), limit_nbytes: int = MAX_METADATA_NBYTES
) -> Root:
    """Read one metadata file, and once more if it turns out to be corrupt."""
    path = filesystem.location(name)

    def parsed(data: bytes) -> Root:
        metadata = parse_metadata(data, path=path, trusted_globals=trusted_globals, limit_nbytes=limit_nbytes)
        return Root(name, data, metadata)

    return reread(lambda: _read_whole(filesystem, name, limit_nbytes), parsed)


def _read_whole(filesystem: Filesystem, name: str, limit_nbytes: int) -> bytes:
    """Return the bytes of a metadata file; one that is larger than most is looked at before memory is taken for it."""
    path = filesystem.location(name)
    try:
        return filesystem.read_all(name, limit_nbytes=min(limit_nbytes, _USUAL_NBYTES))
    except FormatError:
        nbytes = filesystem.file_nbytes(name) or 0
    if nbytes <= limit_nbytes:
        if filesystem.read(name, 0, len(_PICKLE)) != _PICKLE:
            raise MetadataError("It does not begin like a pickle, so it is no metadata of a checkpoint.", path=path)
        with contextlib.suppress(FormatError):  # it grew
            return filesystem.read_all(name, limit_nbytes=limit_nbytes)
    raise UnsafeMetadataError(
        f"It has {nbytes} bytes, and at most {limit_nbytes} are read, so that it can't fill the memory. If it is "
        "genuine, pass a larger metadata_limit_nbytes=.",
        path=path,
    )


def read_whole_temporary(filesystem: Filesystem, name: str) -> Root | None:
    """Read what was to become `.metadata`, or was moved aside for it; None if it is missing or only partly written."""
    try:
        return read_root(filesystem, name)
    except (UnsafeMetadataError, UnsafePathError):
        raise
    except MetadataError:
        return None
    except CheckpointError as error:
        if is_missing(error):
            return None
        raise


def read_current(
    filesystem: Filesystem, *, trusted_globals: Sequence[str] = (), limit_nbytes: int = MAX_METADATA_NBYTES
) -> Root:
    """Read `.metadata` as `read_root` does; if that fails and a save left a copy, the error points to `recover`."""
    try:
        return read_root(filesystem, METADATA_NAME, trusted_globals=trusted_globals, limit_nbytes=limit_nbytes)
    except MetadataError as error:
        if _has_copy(filesystem):
            error.message += " A save left a copy of its metadata here: try `dcp-nvcomp recover`."
        raise


def _has_copy(filesystem: Filesystem) -> bool:
    try:
        return any(map(save_id_of_copy, filesystem.list_names()))
    except CheckpointError:  # credentials may allow to read and not to list
        return False


def read_roots(filesystem: Filesystem, names: Iterable[str]) -> list[Root]:
    """Read every root of a directory."""
    names = sorted(names)
    ranks = [name for name in names if rank_of_metadata_name(name) is not None]
    has_metadata = filesystem.file_nbytes(METADATA_NAME) is not None
    roots = [read_current(filesystem)] if has_metadata else []
    roots += [read_root(filesystem, name) for name in ranks]
    if roots:
        return roots
    raise nothing_there(filesystem, names)


def nothing_there(filesystem: Filesystem, names: Iterable[str]) -> CheckpointNotFoundError:
    """Return the error to raise if no file in a directory is a root: it says what is there instead, if anything is."""
    if any(name.endswith(DATA_FILE_SUFFIX) for name in names):
        return IncompleteCheckpointError(
            "There are data files but no `.metadata`: the save never finished, so there is no checkpoint here. If "
            "`.metadata` was lost, `dcp-nvcomp recover` brings it back.",
            path=filesystem.path,
        )
    return refused(filesystem) or CheckpointNotFoundError(
        "There is no checkpoint here: no `.metadata` was found. `dcp-nvcomp ls` lists those below a directory.",
        path=filesystem.path,
    )


def may_be_named(filesystem: Filesystem, names: Iterable[str], error: BaseException) -> bool:
    """Return whether `.metadata` names one of these files, or may do so yet, although publishing it has failed.

    Args:
        filesystem: the checkpoint's.
        names: the files that it was to name.
        error: what was raised. After an interrupt it is not known how far the storage got.
    """
    if not isinstance(error, CheckpointError) or error.outcome_unknown:
        return True
    try:
        if filesystem.file_nbytes(METADATA_NAME) is None:
            return False
        return bool(read_current(filesystem).files().keys() & set(names))
    except CheckpointError:
        return True
