"""A data file that no `.metadata` names: tensors, and a record of bytes that says what they are."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointExistsError
from dcp_nvcomp.options import parent_and_name
from dcp_nvcomp.saving.data_files import PlannedFile
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.saving.rank_save import RankSave
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.open import place_of


def write_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    last_key: str,
    last: Callable[[], bytes],
    *,
    overwrite: bool = True,
    **writer_options: Any,
) -> None:
    """Write the file: a record for each tensor, and one for the bytes.

    Args:
        path: of the file.
        tensors: by the key of their record.
        last_key: the key of the record of bytes.
        last: returns these bytes; called when all tensors are on their way.
        overwrite: False if a file there may not be replaced.
        **writer_options: of `NvcompWriter`.
    """
    text = os.fspath(path)
    parent, name = parent_and_name(text)
    writer = NvcompWriter(parent, overwrite=overwrite, **writer_options)
    options = writer.options
    engine = EngineChoice(options.engine)
    engine.begin(options.device_memory_budget)
    items = [_item_to_write(key, tensor) for key, tensor in tensors.items()]
    items.append(WriteItem(MetadataIndex(last_key), WriteItemType.BYTE_IO))
    part = RankSave(place_of(parent), uuid.uuid4().hex, 0, items, options)
    with part.open() as filesystem:
        filesystem.create_directory()
        if not overwrite and filesystem.file_nbytes(name) is not None:
            raise CheckpointExistsError("There is such a file already.", path=filesystem.location(name))

        def resolve(item: WriteItem) -> torch.Tensor | io.BytesIO:
            return io.BytesIO(last()) if item.tensor_data is None else tensors[item.index.fqn].detach()

        lanes = [[PlannedFile(name, tuple(items), replaces=True)]]
        part.run(resolve, engine=engine, remembered=process_state().choices, filesystem=filesystem, lanes=lanes)


def _item_to_write(key: str, tensor: torch.Tensor) -> WriteItem:
    offsets = torch.Size([0] * tensor.dim())
    return WriteItem(
        MetadataIndex(key, offsets),
        WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, tensor.size()), TensorProperties(dtype=tensor.dtype), tensor.size()
        ),
    )
