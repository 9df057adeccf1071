"""A file that stands alone, as a checkpoint of that file: its footer says what `.metadata` would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Size
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.engines.tensors import torch_dtype
from dcp_nvcomp.format.data_file import DataFileRef, find_data_file, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import StoredAt
from dcp_nvcomp.format.recognition import file_at, recognize
from dcp_nvcomp.format.record import KIND_TENSOR
from dcp_nvcomp.storage.base import Filesystem


@dataclass(frozen=True)
class LoneFile:
    """A file that is open, and what `.metadata` would say of it."""

    filesystem: Filesystem  # the directory that it is in
    path: str
    file: DataFileRef
    metadata: Metadata


@contextlib.contextmanager
def lone_file(at_path: Filesystem) -> Iterator[LoneFile | None]:
    """Open the file that a path leads to, for a `with` statement; None if no such file is there.

    Raises:
        CheckpointError: it is damaged.
    """
    found = file_at(at_path) if recognize(at_path).kind == "one file" else None
    if found is None:
        yield None
        return
    beside, name, nbytes = found
    with contextlib.closing(beside):
        file = find_data_file(beside, name, nbytes)
        yield LoneFile(beside, beside.location(name), file, _metadata(file, read_footer(beside, file)))


def _metadata(file: DataFileRef, footer: Footer) -> Metadata:
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, StoredAt] = {}
    for number, record in enumerate(footer.records):
        if not record.fqn:  # a pack, whose members have their own
            continue
        index = MetadataIndex(record.fqn)
        described[record.fqn] = BytesStorageMetadata()
        if record.kind == KIND_TENSOR:
            offsets, sizes = Size(record.offsets), Size(record.shape)
            index = MetadataIndex(record.fqn, offsets)
            described[record.fqn] = TensorStorageMetadata(
                TensorProperties(dtype=torch_dtype(record.element)), sizes, [ChunkStorageMetadata(offsets, sizes)]
            )
        stored[index] = StoredAt(file, number)
    return Metadata(described, storage_data=stored)
