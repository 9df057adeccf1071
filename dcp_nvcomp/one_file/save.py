"""save_compressed_checkpoint: one data file, whose last record is the skeleton of the state."""

from __future__ import annotations

import io
import os
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError, CheckpointExistsError, StorageError
from dcp_nvcomp.format.names import ONE_FILE_KEY
from dcp_nvcomp.one_file.structure import take_apart
from dcp_nvcomp.saving.encode.buffers import BufferMemory
from dcp_nvcomp.saving.encode.objects import serialized
from dcp_nvcomp.saving.file_plan import PlannedFile, planned_nbytes
from dcp_nvcomp.saving.kept import kept
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.local.output import sync_directory
from dcp_nvcomp.storage.open import place_of


def save_compressed_checkpoint(
    state: Any, path: str | os.PathLike[str], *, overwrite: bool = True, **writer_options: Any
) -> None:
    """Save what one would give to `torch.save` into one compressed file.

    Tensors are compressed as in checkpoints; everything else is pickled. On local disks and object stores the file
    appears once it is complete; on a disk, a save that is killed leaves `.NAME.<id>.tmp` beside it. Tied tensors, which
    are the same elements of the same memory, stay tied; other views of one storage are saved each for itself.

    The name is that of the recipe in NVIDIA's post on nvCOMP for checkpoints, whose functions this takes the place of.

    Args:
        state: nested dicts, lists and tuples of tensors and other values.
        path: of the file: a local path or any fsspec URL.
        overwrite: False if a file there may not be replaced.
        **writer_options: of `NvcompWriter`, such as `codec`, `thread_count` and `engine`, and of the storage.

    Raises:
        ConfigurationError: an option can't work or is unknown.
        CheckpointExistsError: there is such a file, and it may not be replaced.
        CheckpointError: a value can't be pickled, or the state is nested too deeply.
        StorageError: it can't be written.

    Examples:
        >>> import tempfile, torch
        >>> from dcp_nvcomp import load_compressed_checkpoint, save_compressed_checkpoint
        >>> path = f"{tempfile.mkdtemp()}/model.nvc"
        >>> save_compressed_checkpoint({"w": torch.arange(3), "epoch": 7}, path)
        >>> load_compressed_checkpoint(path)
        {'w': tensor([0, 1, 2]), 'epoch': 7}
    """
    text = os.fspath(path)
    parent, name = parent_and_name(text)
    writer = NvcompWriter(parent, overwrite=overwrite, **writer_options)
    engine = EngineChoice(writer.engine, writer.cuda_zstd)
    engine.begin(writer.device_memory_budget)
    parts = take_apart(state)
    skeleton = _pickled({"state": parts.skeleton, "keys": list(parts.tensors)})
    items = [*(_tensor_item(key, tensor) for key, tensor in parts.tensors.items()), _skeleton_item()]
    write = writer.rank_write(place_of(parent), uuid.uuid4().hex, rank=0)
    filesystem = write.open()
    try:
        filesystem.create_directory()
        if not overwrite and filesystem.file_nbytes(name) is not None:
            raise CheckpointExistsError("There is such a file already.", path=filesystem.location(name))
        is_local = isinstance(filesystem, PosixFilesystem)
        written = f".{name}.{write.save_id}.tmp" if is_local else name
        state_nbytes = sum(map(planned_nbytes, items))

        def resolve(item: WriteItem) -> torch.Tensor | io.BytesIO:
            return io.BytesIO(skeleton) if item.tensor_data is None else parts.tensors[item.index.fqn].detach()

        write.job(
            filesystem,
            [[PlannedFile(written, tuple(items))]],
            resolve,
            BufferMemory(
                writer.host_memory_budget,
                threads=writer.thread_count + 1,
                state_nbytes=state_nbytes,
                may_use_cuda=engine.may_use_cuda(),
            ),
            engine=engine,
            remembered=kept().choices,
            progress=lambda nbytes: None,
        ).run()
        if is_local:
            _replace(filesystem, written, place_of(text))
    finally:
        filesystem.close()


def _pickled(skeleton: Any) -> bytes:
    try:
        return serialized(skeleton).getvalue()
    except Exception as error:  # pickle lets through whatever an object's own methods raise
        raise CheckpointError(
            f"A value can't be pickled, so the state can't be saved: {type(error).__name__}: {error}"
        ) from error


def _tensor_item(key: str, tensor: torch.Tensor) -> WriteItem:
    offsets = torch.Size([0] * tensor.dim())
    return WriteItem(
        MetadataIndex(key, offsets),
        WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, tensor.size()), TensorProperties(dtype=tensor.dtype), tensor.size()
        ),
    )


def _skeleton_item() -> WriteItem:
    return WriteItem(MetadataIndex(ONE_FILE_KEY), WriteItemType.BYTE_IO)


def _replace(filesystem: Filesystem, written: str, final: str) -> None:
    directory = os.path.dirname(final)
    try:
        os.replace(os.path.join(directory, written), final)
        sync_directory(directory)
    except OSError as error:
        filesystem.remove([written])
        raise StorageError.from_os_error("write", final, error) from error
