"""Checkpoints of this package and of stock DCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_nvcomp.conversion.entries import ObjectEntry, ObjectReader, Source, TensorEntry, TensorReader
from dcp_nvcomp.format.blocks import Box
from dcp_nvcomp.format.metadata.paths import has_keys, paths_of
from dcp_nvcomp.reading.checkpoint import Checkpoint, open_checkpoint
from dcp_nvcomp.reading.stored_tensor import StoredTensor
from dcp_nvcomp.storage.open import place_of

# What is read is written soon, and less memory than a load may take is enough for that.
_HOST_MEMORY_NBYTES = 64 << 20


class CheckpointSource(Source):
    """A checkpoint, whatever its number of ranks."""

    def __init__(self, path: str, **storage_options: Any) -> None:
        self._place = place_of(path)
        self._checkpoint = open_checkpoint(path, host_memory_budget=_HOST_MEMORY_NBYTES, **storage_options)

    @property
    def path(self) -> str:
        return self._checkpoint.path

    @property
    def files(self) -> Sequence[str]:
        return [f"{self._place.rstrip('/')}/{name}" for name in sorted(self._checkpoint.file_names())]

    @property
    def has_keys(self) -> bool:
        return has_keys(self._checkpoint.metadata)

    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        found: list[TensorEntry | ObjectEntry] = []
        described = self._checkpoint.metadata.state_dict_metadata
        paths = paths_of(self._checkpoint.metadata)
        positions = {key: position for position, key in enumerate(paths)}
        for key in self._checkpoint.in_file_order():
            item, stored = described[key], self._checkpoint.stored(key)
            if isinstance(item, TensorStorageMetadata) and stored is not None:
                reader = _TensorReader(stored)
                found.append(
                    TensorEntry(key, paths[key], tuple(item.size), item.properties.dtype, reader, positions[key])
                )
            else:
                found.append(ObjectEntry(key, paths[key], _ObjectReader(self._checkpoint, key), positions[key]))
        return found

    def close(self) -> None:
        self._checkpoint.close()


class _TensorReader(TensorReader):
    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def read(self, box: Box) -> torch.Tensor:
        tensor: torch.Tensor = self._stored[box.index]
        return tensor


class _ObjectReader(ObjectReader):
    def __init__(self, checkpoint: Checkpoint, key: str) -> None:
        self._checkpoint, self._key = checkpoint, key

    def stored(self) -> bytes:
        return self._checkpoint.read_stored_object(self._key)

    def value(self) -> Any:
        return self._checkpoint[self._key]
