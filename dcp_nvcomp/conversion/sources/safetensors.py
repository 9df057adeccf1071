"""safetensors: one file, or the files of a directory, read as ranges from any storage."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.conversion.entries import ObjectEntry, Source, TensorEntry, TensorReader
from dcp_nvcomp.conversion.safetensors_format import INDEX_NAME, MAX_HEADER_NBYTES, StoredPart, parse_header
from dcp_nvcomp.errors import CheckpointNotFoundError, CorruptDataError
from dcp_nvcomp.format.blocks import Box
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

__all__ = ["SafetensorsSource"]


class SafetensorsSource(Source):
    """A safetensors file, or a directory of such files.

    Args:
        path: a local path or any fsspec URL; of a directory, all files that its index names, or that end in
            `.safetensors` if there is no index.
        storage_options: for the fsspec filesystem.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptDataError: a file is no safetensors file.
    """

    def __init__(self, path: str, **storage_options: Any) -> None:
        self._path = without_secrets(path)
        single = path.endswith(".safetensors")
        directory, name = parent_and_name(path) if single else (path, "")
        self._filesystem = open_filesystem(directory, storage_options=storage_options)
        try:
            names = [name] if single else _names(self._filesystem)
            if not names:
                raise CheckpointNotFoundError("There is no safetensors file.", path=self._path)
            self._parts = [(name, part) for name in names for part in self._header(name)]
        except BaseException:
            self.close()
            raise

    def _header(self, name: str) -> list[StoredPart]:
        path = self._filesystem.location(name)
        nbytes = self._filesystem.file_nbytes(name)
        if nbytes is None:
            raise CheckpointNotFoundError("There is no such file.", path=path)
        length = int.from_bytes(self._filesystem.read(name, 0, 8), "little") if nbytes >= 8 else -1
        if not 0 < length <= min(MAX_HEADER_NBYTES, nbytes - 8):
            raise CorruptDataError("This is no safetensors file.", path=path)
        return parse_header(self._filesystem.read(name, 8, 8 + length), path=path, file_nbytes=nbytes)

    @property
    def path(self) -> str:
        return self._path

    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        return [
            TensorEntry(part.key, (part.key,), part.shape, part.dtype, _Ranges(self._filesystem, name, part))
            for name, part in self._parts
        ]

    def close(self) -> None:
        self._filesystem.close()


def _names(filesystem: Filesystem) -> list[str]:
    names = filesystem.list_names()
    if INDEX_NAME not in names:
        return [name for name in names if name.endswith(".safetensors")]
    data = filesystem.read_all(INDEX_NAME, limit_nbytes=MAX_HEADER_NBYTES)
    try:
        return sorted(set(json.loads(data)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError("This is no index of safetensors.", path=filesystem.location(INDEX_NAME)) from error


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
