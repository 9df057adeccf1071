"""safetensors: one file, or a directory of files with their index, as huggingface_hub names them.

Files are written front to back. A directory's index comes last; files that an earlier attempt finished, and that are
what this one would write, are left as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.conversion.entries import ObjectEntry, TensorEntry, pieces
from dcp_nvcomp.conversion.safetensors_format import DTYPES, INDEX_NAME, SINGLE_NAME, header_of
from dcp_nvcomp.errors import CheckpointExistsError, ConfigurationError
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

__all__ = ["write_safetensors"]


@dataclass(frozen=True)
class _File:
    """A file to write."""

    name: str
    entries: tuple[TensorEntry, ...]

    @property
    def header(self) -> bytes:
        return header_of([(entry.key, entry.shape, entry.dtype) for entry in self.entries])

    @property
    def data_nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def write_safetensors(
    path: str,
    entries: Sequence[TensorEntry | ObjectEntry],
    moved: Callable[[int], None],
    *,
    max_shard_nbytes: int,
    overwrite: bool,
    storage_options: Mapping[str, Any],
) -> None:
    """Write tensors as safetensors.

    Args:
        path: of a file, if it ends in `.safetensors`, else of a directory.
        entries: the tensors.
        moved: called with the size of each piece.
        max_shard_nbytes: how large a file of a directory may be, unless it holds a single tensor.
        overwrite: True if files may be replaced.
        storage_options: for the fsspec filesystem.

    Raises:
        ConfigurationError: the format has no Python objects, and not every dtype.
        CheckpointExistsError: there is such a file, and it may not be replaced.
    """
    tensors = _tensors(entries)
    is_file = path.endswith(".safetensors")
    directory, name = parent_and_name(path) if is_file else (path, SINGLE_NAME)
    files = [_File(name, tuple(tensors))] if is_file else _split(tensors, max_shard_nbytes)
    filesystem = open_filesystem(directory, storage_options=storage_options)
    try:
        filesystem.create_directory()
        last = name if len(files) == 1 else INDEX_NAME
        if not overwrite and filesystem.file_nbytes(last) is not None:
            raise CheckpointExistsError("There is such a file already.", path=filesystem.location(last))
        if len(files) > 1:
            filesystem.remove([INDEX_NAME])  # so that no index names files of two conversions
        for file in files:
            if len(files) > 1 and _is_there(filesystem, file):
                moved(file.data_nbytes)
            else:
                _write(filesystem, file, moved)
        if len(files) > 1:
            filesystem.publish(INDEX_NAME, _index(files))
    finally:
        filesystem.close()


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
            raise ConfigurationError(f"safetensors has no {entry.dtype}: convert with dtype=.", fqn=entry.key)
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
    return [
        _File(f"model-{number:05}-of-{len(groups):05}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def _is_there(filesystem: Filesystem, file: _File) -> bool:
    """True if an earlier attempt finished this file: its size is that of its header only once all of it is written."""
    header = file.header
    nbytes = filesystem.file_nbytes(file.name)
    return nbytes == len(header) + file.data_nbytes and filesystem.read(file.name, 0, len(header)) == header


def _write(filesystem: Filesystem, file: _File, moved: Callable[[int], None]) -> None:
    filesystem.remove([file.name])  # what an attempt that was killed left, or what is to be replaced
    output = filesystem.open_output(file.name)
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
