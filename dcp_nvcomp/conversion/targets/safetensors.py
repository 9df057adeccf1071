"""safetensors: one file, or a directory of files with their index, as huggingface_hub names them.

Each file is written front to back and takes its name when it is complete. A directory's index comes last. Until then
PROGRESS_NAME says what the files are of: an attempt that was cut off goes on only if it is of the same source, and
nothing else of a model is in the directory then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.conversion.entries import ObjectEntry, TensorEntry, pieces
from dcp_nvcomp.conversion.safetensors_format import (
    DTYPES,
    INDEX_NAME,
    MAX_HEADER_NBYTES,
    PROGRESS_NAME,
    SINGLE_NAME,
    header_of,
    is_name_of_model,
    shard_name,
)
from dcp_nvcomp.errors import CheckpointExistsError, ConcurrentSaveError, ConfigurationError
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from dcp_nvcomp.storage.temporary import published_name


@dataclass(frozen=True)
class _File:
    """A file to write."""

    name: str
    entries: tuple[TensorEntry, ...]

    @property
    def header(self) -> bytes:
        paths = {entry.key: entry.path for entry in self.entries}
        return header_of([(entry.key, entry.shape, entry.dtype) for entry in self.entries], paths)

    @property
    def data_nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def write_safetensors(
    path: str,
    entries: Sequence[TensorEntry | ObjectEntry],
    moved: Callable[[int], None],
    *,
    source: Sequence[Any],
    max_shard_nbytes: int,
    overwrite: bool,
    storage_options: Mapping[str, Any],
) -> None:
    """Write tensors as safetensors."""
    tensors = _tensors(entries)
    if path.endswith(".safetensors"):
        directory, name = parent_and_name(path)
        files = [_File(name, tuple(tensors))]
    else:
        directory, files = path, _split(tensors, max_shard_nbytes)
    headers = [file.header for file in files]  # before anything is written: a key may be one that the format can't have
    filesystem = open_filesystem(directory, storage_options=storage_options)
    try:
        if path.endswith(".safetensors"):
            if not overwrite and filesystem.file_nbytes(files[0].name) is not None:
                raise _exists(filesystem, files[0].name)
            filesystem.create_directory()
            _write(filesystem, files[0], moved)
        else:
            _write_directory(filesystem, files, moved, _progress(source, headers), overwrite=overwrite)
    finally:
        filesystem.close()


def _write_directory(
    filesystem: Filesystem, files: Sequence[_File], moved: Callable[[int], None], progress: bytes, *, overwrite: bool
) -> None:
    names = filesystem.list_names()
    unfinished = PROGRESS_NAME in names and INDEX_NAME not in names and SINGLE_NAME not in names
    there = [name for name in names if is_name_of_model(name)]
    if there and not (overwrite or unfinished):
        raise _exists(filesystem, there[0])
    old = [name for name in names if is_name_of_model(published_name(name) or name)]
    filesystem.create_directory()
    if len(files) == 1:
        _write(filesystem, files[0], moved)  # before the old ones go: huggingface's loaders look for this name first
        _remove(filesystem, [name for name in old if name != SINGLE_NAME])
        filesystem.remove([PROGRESS_NAME])
        return
    if overwrite or not unfinished or _known_progress(filesystem) != progress:
        filesystem.publish(PROGRESS_NAME, b"{}")  # of nothing, until nothing of an earlier one is there
        _remove(filesystem, old)
        filesystem.publish(PROGRESS_NAME, progress)
    for file in files:
        if _is_there(filesystem, file):
            moved(file.data_nbytes)
        else:
            _write(filesystem, file, moved)
    if _known_progress(filesystem) != progress:
        raise ConcurrentSaveError("Another conversion writes to this directory: choose another.", path=filesystem.path)
    filesystem.publish(INDEX_NAME, _index(files))
    filesystem.remove([PROGRESS_NAME])


def _remove(filesystem: Filesystem, names: Sequence[str]) -> None:
    """Remove files of an earlier conversion, the index first, so that none names what is gone."""
    filesystem.remove([name for name in names if name == INDEX_NAME])
    filesystem.remove([name for name in names if name != INDEX_NAME])


def _exists(filesystem: Filesystem, name: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        "There is such a file already; overwrite=True, or --overwrite, replaces it.", path=filesystem.location(name)
    )


def _progress(source: Sequence[Any], headers: Sequence[bytes]) -> bytes:
    """Return what an attempt leaves that is cut off: only one of the same source, into the same files, goes on."""
    digest = hashlib.sha256(b"".join(headers)).hexdigest()
    return json.dumps({"source": source, "headers": digest}, indent=1).encode()


def _known_progress(filesystem: Filesystem) -> bytes:
    return filesystem.read_all(PROGRESS_NAME, limit_nbytes=MAX_HEADER_NBYTES)


def _tensors(entries: Sequence[TensorEntry | ObjectEntry]) -> list[TensorEntry]:
    objects = [entry.key for entry in entries if isinstance(entry, ObjectEntry)]
    if objects:
        shown = ", ".join(map(repr, objects[:3]))
        raise ConfigurationError(
            f"safetensors holds tensors only, and {len(objects)} keys are Python objects, such as {shown}: choose "
            "what to convert with prefix=, such as 'model.'."
        )
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    for entry in tensors:
        if entry.dtype not in DTYPES:
            advice = "convert with dtype=" if entry.dtype.is_floating_point else "leave it out by prefix="
            raise ConfigurationError(f"safetensors has no {entry.dtype}: {advice}.", fqn=entry.key)
    return tensors


def _split(tensors: Sequence[TensorEntry], max_shard_nbytes: int) -> list[_File]:
    groups: list[list[TensorEntry]] = [[]]
    nbytes = 0
    for entry in tensors:
        if groups[-1] and nbytes + entry.nbytes > max_shard_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(entry)
        nbytes += entry.nbytes
    if len(groups) == 1:
        return [_File(SINGLE_NAME, tuple(groups[0]))]
    return [_File(shard_name(number, len(groups)), tuple(group)) for number, group in enumerate(groups, 1)]


def _is_there(filesystem: Filesystem, file: _File) -> bool:
    """True if an earlier attempt finished this file."""
    header = file.header
    nbytes = filesystem.file_nbytes(file.name)
    return nbytes == len(header) + file.data_nbytes and filesystem.read(file.name, 0, len(header)) == header


def _write(filesystem: Filesystem, file: _File, moved: Callable[[int], None]) -> None:
    output = filesystem.open_replacement(file.name)
    try:
        output.write(file.header)
        for entry in file.entries:
            for box in pieces(entry.shape, entry.dtype.itemsize):
                tensor = entry.read(box)
                if tensor.numel():
                    output.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                moved(tensor.nbytes)
        output.close()
    except BaseException:
        output.abort()
        raise


def _index(files: Sequence[_File]) -> bytes:
    return json.dumps(
        {
            "metadata": {"total_size": sum(file.data_nbytes for file in files)},
            "weight_map": {entry.key: file.name for file in files for entry in file.entries},
        },
        indent=2,
    ).encode()
