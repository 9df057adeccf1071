"""safetensors: one file, or the files of a directory, read as ranges from any storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.conversion.entries import ObjectEntry, Source, TensorEntry, TensorReader
from dcp_nvcomp.conversion.places import is_file, names_in
from dcp_nvcomp.conversion.safetensors_format import (
    INDEX_NAME,
    MAX_HEADER_NBYTES,
    PROGRESS_NAME,
    StoredPart,
    parse_header,
)
from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError, CorruptDataError, IncompleteCheckpointError
from dcp_nvcomp.format.blocks import Box
from dcp_nvcomp.format.recognition import linked_to
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem, check_relative_path
from dcp_nvcomp.storage.open import open_filesystem, place_of


class SafetensorsSource(Source):
    """A safetensors file, or a directory of such files."""

    def __init__(self, path: str, **storage_options: Any) -> None:
        self._path = without_secrets(path)
        self._options = storage_options
        self._filesystems: dict[str, Filesystem] = {}
        try:
            paths = [path] if is_file(path, storage_options) else self._paths(place_of(path).rstrip("/") or "/")
            if not paths:
                raise CheckpointNotFoundError("There is no safetensors file.", path=self._path)
            self._parts = [(file, part) for file in map(linked_to, paths) for part in self._header(file)]
            self._check_keys()
        except BaseException:
            self.close()
            raise

    def _file(self, file: str) -> tuple[Filesystem, str]:
        """Return the directory that a file is in, and its name there."""
        parent, name = parent_and_name(file)
        if parent not in self._filesystems:
            self._filesystems[parent] = open_filesystem(parent, storage_options=self._options)
        return self._filesystems[parent], name

    def _paths(self, directory: str) -> list[str]:
        """Return the files of a directory; local ones may be links, as in the cache of huggingface_hub."""
        names = set(names_in(directory, self._options))
        if INDEX_NAME in names:
            filesystem, name = self._file(linked_to(f"{directory}/{INDEX_NAME}"))
            data = filesystem.read_all(name, limit_nbytes=MAX_HEADER_NBYTES)
            try:
                found = sorted(set(parse_json(data)["weight_map"].values()))
                wanted = [check_relative_path(one, path=self._path) for one in found]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CorruptDataError("This is no index of safetensors.", path=filesystem.location(name)) from error
        elif PROGRESS_NAME in names:
            raise IncompleteCheckpointError(
                "A conversion to this directory was cut off: repeat it, and it goes on where it was.", path=self._path
            )
        else:
            wanted = sorted(name for name in names if name.endswith(".safetensors"))
        return [f"{directory}/{name}" for name in wanted]

    def _header(self, file: str) -> list[StoredPart]:
        filesystem, name = self._file(file)
        path = filesystem.location(name)
        nbytes = filesystem.file_nbytes(name)
        if nbytes is None:
            raise CheckpointNotFoundError("There is no such file.", path=path)
        length = int.from_bytes(filesystem.read(name, 0, 8), "little") if nbytes >= 8 else -1
        if not 0 < length <= min(MAX_HEADER_NBYTES, nbytes - 8):
            raise CorruptDataError("This is no safetensors file.", path=path)
        return parse_header(filesystem.read(name, 8, 8 + length), path=path, file_nbytes=nbytes)

    def _check_keys(self) -> None:
        where: dict[str, str] = {}
        for file, part in self._parts:
            if part.key in where:
                raise CheckpointError(
                    f"Two tensors have this key, in {without_secrets(where[part.key])} and here: convert one file, or "
                    "remove what does not belong here.",
                    path=file,
                    fqn=part.key,
                )
            where[part.key] = file

    @property
    def path(self) -> str:
        return self._path

    @property
    def files(self) -> Sequence[str]:
        return list(dict.fromkeys(file for file, _ in self._parts))

    @property
    def has_keys(self) -> bool:
        return all(part.path != (part.key,) for _, part in self._parts)

    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        return [
            TensorEntry(part.key, part.path, part.shape, part.dtype, _Ranges(*self._file(file), part))
            for file, part in self._parts
        ]

    def close(self) -> None:
        for filesystem in self._filesystems.values():
            filesystem.close()


class _Ranges(TensorReader):
    """Reads from the first to the last element of a box."""

    def __init__(self, filesystem: Filesystem, name: str, part: StoredPart) -> None:
        self._filesystem, self._name, self._part = filesystem, name, part

    def read(self, box: Box) -> torch.Tensor:
        part = self._part
        if not box.elements:
            return torch.empty(box.sizes, dtype=part.dtype)
        strides = [math.prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
        first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
        data = bytearray((last - first + 1) * part.dtype.itemsize)
        self._filesystem.read_into(self._name, part.start + first * part.dtype.itemsize, memoryview(data))
        flat = torch.frombuffer(data, dtype=torch.uint8).view(part.dtype)
        return flat.as_strided(box.sizes, strides)
