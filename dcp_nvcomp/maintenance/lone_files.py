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
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.data_file import DataFileRef, find_data_file, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import StoredAt
from dcp_nvcomp.format.recognition import file_at, stands_alone
from dcp_nvcomp.format.record import KIND_TENSOR
from dcp_nvcomp.storage.base import Filesystem


@dataclass(frozen=True)
class LoneFile:
    """A file that is there, and the directory that it is in."""

    filesystem: Filesystem
    name: str
    nbytes: int

    def read_metadata(self) -> tuple[DataFileRef, Metadata]:
        """Return how `.metadata` would name it, and what it would say of it.

        Raises:
            CheckpointError: the footer can't be read.
        """
        file = find_data_file(self.filesystem, self.name, self.nbytes)
        return file, _metadata(file, read_footer(self.filesystem, file))

    def is_still(self, file: DataFileRef) -> bool:
        """Return False if it is known to be another one, or gone, by now."""
        try:
            nbytes = self.filesystem.file_nbytes(self.name)
            return nbytes is not None and find_data_file(self.filesystem, self.name, nbytes) == file
        except CheckpointError:
            return True


@contextlib.contextmanager
def lone_file(at_path: Filesystem) -> Iterator[LoneFile | None]:
    """Open the file that a path leads to, for a `with` statement; None if no such file can be seen there."""
    found = None
    with contextlib.suppress(CheckpointError):  # there is a first error to raise
        found = file_at(at_path)
    if found is None:
        yield None
        return
    with contextlib.closing(found[0]):
        yield LoneFile(*found) if stands_alone(*found) else None


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
