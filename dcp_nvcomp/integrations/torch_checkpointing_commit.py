"""The commit of torch_checkpointing.py: `.commit.json` names the files of a checkpoint, with their sizes and CRCs."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConcurrentSaveError,
    FormatError,
    StorageError,
)
from dcp_nvcomp.format.data_file import DataFileRef, find_data_file
from dcp_nvcomp.storage.base import Filesystem, published_name

COMMIT_NAME = ".commit.json"
_LIMIT_NBYTES = 1 << 30
_DATA = re.compile(r"\.data-[0-9a-f]{32}")

Open = Callable[[str], Filesystem]


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was committed."""

    data: str  # path of the directory with its files
    files: Mapping[str, DataFileRef]  # by the path that they have in the checkpoint


def is_data(name: str) -> bool:
    """True for the name of a directory with the files of a save."""
    return _DATA.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """True for what a killed save leaves beside its files on a local disk."""
    return published_name(name.removeprefix(".")) is not None


def read_commit(open_directory: Open, directory: str) -> Commit | None:
    """Return what was committed in a directory; None if nothing was.

    Raises:
        FormatError: it is invalid.
        CheckpointNotFoundError: a file is missing, or has another size.
    """
    with closing(open_directory(directory)) as filesystem:
        if filesystem.file_nbytes(COMMIT_NAME) is None:
            return None
        text = filesystem.read_all(COMMIT_NAME, limit_nbytes=_LIMIT_NBYTES)
        try:
            described = parse_json(text)
            data, rows = described["data"], described["files"]
            if not isinstance(data, str) or not is_data(data):
                raise ValueError(f"a directory named {data!r}")
            files = {path: _ref(path, row) for path, row in rows.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"This is not what a commit writes: {type(error).__name__}: {error}",
                path=filesystem.location(COMMIT_NAME),
            ) from error
    commit = Commit(f"{directory}/{data}", files)
    with closing(open_directory(commit.data)) as filesystem:
        there = {file.name: file.nbytes for file in filesystem.list_files()}
        for path, file in files.items():
            nbytes = there.get(file.name)
            if nbytes != file.nbytes:
                what = "it is not there" if nbytes is None else f"it has {nbytes}"
                raise CheckpointNotFoundError(
                    f"The checkpoint was committed with a file {path!r} of {file.nbytes} bytes; {what}.",
                    path=filesystem.location(file.name),
                )
    return commit


def _ref(path: str, row: Any) -> DataFileRef:
    nbytes, footer_nbytes, footer_crc = row
    if any(type(value) is not int or value < 0 for value in row):
        raise ValueError(f"file {path!r}")
    return DataFileRef(quote(path, safe=""), nbytes, footer_nbytes, footer_crc)


def write_commit(open_directory: Open, directory: str, data: str) -> list[str]:
    """Commit the files in the directory `data` below a directory.

    Returns:
        The directories there with files of other saves, which were never committed.

    Raises:
        OSError: something else is in the way, or was committed before, or there are no files.
    """
    parent, _, name = directory.rpartition("/")
    with closing(open_directory(parent)) as filesystem:
        if filesystem.file_nbytes(name) is not None:
            raise StorageError("A file is in the way of a checkpoint.", path=directory, errno=errno.ENOTDIR)
    with closing(open_directory(directory)) as filesystem:
        names, folders = filesystem.list_names(), filesystem.list_folders()
    committed = CheckpointExistsError("A checkpoint was committed here before.", path=directory)
    if COMMIT_NAME in names:
        raise committed
    others = {name for name in (*names, *folders) if not is_data(name) and not is_temporary(name)}
    if others:
        raise StorageError(f"{min(others)!r} is there already.", path=directory, errno=errno.ENOTEMPTY)
    with closing(open_directory(f"{directory}/{data}")) as filesystem:
        found = [(file.name, file.nbytes) for file in filesystem.list_files() if not is_temporary(file.name)]
        files = filesystem.map(lambda file: find_data_file(filesystem, *file), found)
    if not files:
        raise CheckpointNotFoundError("No file was written for this checkpoint.", path=directory)
    text = json.dumps({"data": data, "files": {unquote(file.name): file[1:] for file in files}}, indent=0)
    with closing(open_directory(directory)) as filesystem:
        try:
            filesystem.publish(COMMIT_NAME, text.encode(), overwrite=False)
        except ConcurrentSaveError as error:
            raise committed from error
        with suppress(CheckpointError):
            filesystem.remove(name for name in names if is_temporary(name))
    return [folder for folder in folders if is_data(folder) and folder != data]
