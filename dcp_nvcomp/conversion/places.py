"""Where a conversion reads and writes: what is a file, which files are the same, and which have changed since."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.errors import CheckpointExistsError, ConfigurationError
from dcp_nvcomp.format.recognition import file_at, is_local, linked_to
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of, real_place


def is_file(path: str, options: Mapping[str, Any]) -> bool:
    """Return whether there is a file, and not a directory, at a path or URL."""
    with contextlib.closing(open_filesystem(path, storage_options=options)) as filesystem:
        found = file_at(filesystem)
    if found is not None:
        found[0].close()
    return found is not None


def exists_already(filesystem: Filesystem, name: str) -> CheckpointExistsError:
    """Return the error of a file that may not be replaced."""
    return CheckpointExistsError(
        "There is such a file already; overwrite=True, or --overwrite, replaces it.", path=filesystem.location(name)
    )


def names_in(directory: str, options: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the files in a directory, links to files among them; none if there is no directory."""
    with contextlib.closing(open_filesystem(directory, storage_options=options)) as filesystem:
        names = filesystem.list_names()
    if not is_local(directory):
        return names
    place = place_of(directory)
    try:
        links = [name for name in os.listdir(place) if os.path.islink(os.path.join(place, name))]
    except OSError:
        links = []
    return sorted([*names, *(name for name in links if os.path.isfile(os.path.join(place, name)))])


def check_no_overlap(files: Sequence[str], destination: str, writes: Callable[[str], bool] | None) -> None:
    """Refuse a destination whose files are read by the same conversion."""
    there = real_place(destination)
    for file in files:
        parent, name = parent_and_name(file)
        ways = {real_place(file), f"{real_place(parent).rstrip('/')}/{name}"}
        for way in ways:
            folder, _, last = way.rpartition("/")
            if way == there if writes is None else (folder or "/") == there and writes(last):
                raise ConfigurationError(
                    "The conversion would write over a file that it reads: choose another destination.", path=file
                )


def stamps(files: Sequence[str], options: Mapping[str, Any]) -> list[list[Any]]:
    """Return name, size and time of writing of files, by which they are known from others at the same place."""
    if files and is_local(files[0]):
        found = [(file, os.stat(file)) for file in map(linked_to, files) if os.path.exists(file)]
        return [[file, status.st_size, status.st_mtime_ns] for file, status in found]
    listed: dict[str, dict[str, list[Any]]] = {}
    for file in files:
        parent, _ = parent_and_name(file)
        if parent not in listed:
            with contextlib.closing(open_filesystem(parent, storage_options=options)) as filesystem:
                listed[parent] = {one.name: [one.nbytes, one.modified_seconds] for one in filesystem.list_files()}
    places = [parent_and_name(file) for file in files]
    return [[real_place(f"{parent}/{name}"), *listed[parent].get(name, [])] for parent, name in places]
