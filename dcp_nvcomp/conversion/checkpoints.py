"""Read and write checkpoints of this package and of stock DCP.

Tensors larger than a piece become several shards of whole rows, as if as many ranks had saved them, so that no more
than a few pieces are in memory at a time.
"""

from __future__ import annotations

import dataclasses
import io
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_nvcomp.calls.ranks import error_of_ranks, expect_no_group
from dcp_nvcomp.conversion.entries import ObjectEntry, Source, TensorEntry, paths_in_order, pieces
from dcp_nvcomp.errors import CheckpointExistsError
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.metadata.paths import has_keys, paths_of, paths_to_store
from dcp_nvcomp.format.metadata.roots import may_be_named
from dcp_nvcomp.format.metadata.shares import end_removal
from dcp_nvcomp.format.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
    data_file_rank,
    rank_of_metadata_name,
    save_id_of_copy,
)
from dcp_nvcomp.format.recognition import is_local
from dcp_nvcomp.reading.checkpoint import open_checkpoint
from dcp_nvcomp.reading.stored_tensor import StoredTensor
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.commit import files_of_current, remove_files, remove_unneeded
from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.base import BESIDE, Filesystem, storage_errors
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of

# What is read is written soon, and less memory than a load may take is enough for that.
_READING_NBYTES = 64 << 20


class CheckpointSource(Source):
    """A checkpoint, whatever its number of ranks."""

    def __init__(self, path: str, **storage_options: Any) -> None:
        self._checkpoint = open_checkpoint(path, host_memory_budget=_READING_NBYTES, **storage_options)
        self.path = self._checkpoint.path
        place = place_of(path).rstrip("/")
        self.files = [_place_beside(place, name) for name in sorted(self._checkpoint.file_names())]
        self.has_keys = has_keys(self._checkpoint.metadata)

    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        checkpoint = self._checkpoint
        paths = paths_of(checkpoint.metadata)
        positions = {key: position for position, key in enumerate(paths)}
        found: list[TensorEntry | ObjectEntry] = []
        for key in checkpoint.in_file_order():
            path, position, stored = paths[key], positions[key], checkpoint.stored(key)
            if stored is None:
                read, load = partial(checkpoint.read_stored_object, key), partial(checkpoint.__getitem__, key)
                found.append(ObjectEntry(key, path, read, load, position))
            else:
                read_box = partial(_read_box, stored)
                found.append(TensorEntry(key, path, tuple(stored.shape), stored.dtype, read_box, position))
        return found

    def close(self) -> None:
        self._checkpoint.close()


def _place_beside(place: str, name: str) -> str:
    """Return where a file of a checkpoint is, which may be in one beside it: URLs of some storages have no `..`."""
    if name.startswith(BESIDE):
        if is_local(place):
            place = os.path.realpath(place)  # beside the directory, not beside a link to it
        place, name = place.rpartition("/")[0], name.removeprefix(BESIDE)
    return f"{place}/{name}"


def _read_box(stored: StoredTensor, box: Box) -> torch.Tensor:
    tensor: torch.Tensor = stored[box.index]
    return tensor


class ConvertingPlanner(SavePlanner):
    """Plans and provides entries of a source."""

    def __init__(
        self, entries: Sequence[TensorEntry | ObjectEntry], moved: Callable[[int], None], *, has_keys: bool
    ) -> None:
        self._has_keys = has_keys
        self._entries = {entry.key: entry for entry in entries}
        self._moved = moved

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for entry in self._entries.values():
            if isinstance(entry, TensorEntry):
                items += _tensor_items(entry)
            else:
                items.append(WriteItem(MetadataIndex(entry.key), WriteItemType.BYTE_IO))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        paths = paths_in_order(self._entries.values())
        stored = paths_to_store(paths)
        if not self._has_keys:
            stored = {key: stored[key] for key in paths}
        return plans, dataclasses.replace(metadata, planner_data=stored)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        entry = self._entries[write_item.index.fqn]
        if isinstance(entry, ObjectEntry):
            return io.BytesIO(entry.stored())
        assert write_item.tensor_data is not None
        shard = write_item.tensor_data.chunk
        tensor = entry.read(Box(tuple(shard.offsets), tuple(shard.sizes)))
        self._moved(tensor.nbytes)
        return tensor


def _tensor_items(entry: TensorEntry) -> list[WriteItem]:
    boxes = list(pieces(entry.shape, entry.dtype.itemsize))
    kind = WriteItemType.TENSOR if len(boxes) == 1 else WriteItemType.SHARD
    size, properties = torch.Size(entry.shape), TensorProperties(dtype=entry.dtype)
    return [
        WriteItem(
            MetadataIndex(entry.key, torch.Size(box.offsets), number),
            kind,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), properties, size
            ),
        )
        for number, box in enumerate(boxes)
    ]


_WRITING_NBYTES = 48 << 20
_UPLOAD_NBYTES = 16 << 20
_STOCK_FILE_NBYTES = 64 << 20
_FAILED = "a failed conversion"


def is_name_of_checkpoint(name: str) -> bool:
    """True for the names that files of checkpoints have, of this package and of stock DCP."""
    is_metadata = name == METADATA_NAME or rank_of_metadata_name(name) is not None or save_id_of_copy(name) is not None
    return is_metadata or data_file_rank(name) is not None


def write_ours(
    path: str, planner: ConvertingPlanner, *, codec: Any, overwrite: bool, storage_options: Mapping[str, Any]
) -> None:
    """Write a checkpoint of this package; it appears once it is complete."""
    writer = NvcompWriter(
        path,
        codec=codec,
        overwrite=overwrite,
        engine="cpu",
        thread_count=min(2, os.cpu_count() or 1),
        host_memory_budget=_WRITING_NBYTES,
        **storage_options,
    )
    _save(writer, planner)


def write_dcp(path: str, planner: ConvertingPlanner, *, overwrite: bool, storage_options: Mapping[str, Any]) -> None:
    """Write a checkpoint of stock DCP, with its own writer; elsewhere than on disk by way of a temporary directory."""
    filesystem = open_filesystem(path, storage_options=storage_options)
    try:
        if not overwrite and filesystem.file_nbytes(METADATA_NAME) is not None:
            raise CheckpointExistsError(
                "Checkpoint already exists; overwrite=True, or --overwrite, replaces it.", path=filesystem.path
            )
        filesystem.create_directory()
        replaced = files_of_current(filesystem) or set()
        save = _StockSave(planner)
        try:
            errors = storage_errors("write", filesystem.path)
            with errors, tempfile.TemporaryDirectory(prefix="dcp_nvcomp_") as directory:
                if isinstance(filesystem, PosixFilesystem):
                    data = save.run(place_of(path), directory, path)
                else:
                    data = save.run(directory, directory, path)
                    for name in save.names:
                        _upload(filesystem, Path(directory) / name)
                end_removal(filesystem)
        except BaseException:
            remove_files(filesystem, save.names, _FAILED)
            raise
        try:
            filesystem.publish(METADATA_NAME, data, overwrite=overwrite)
        except BaseException as error:
            if not may_be_named(filesystem, save.names, error):
                remove_files(filesystem, save.names, _FAILED)
            raise
        remove_unneeded(filesystem, replaced - {METADATA_NAME}, "the replaced checkpoint")
    finally:
        filesystem.close()


def _upload(filesystem: Filesystem, file: Path) -> None:
    with filesystem.open_output(file.name) as output, file.open("rb") as opened:
        while data := opened.read(_UPLOAD_NBYTES):
            output.write(data)


class _StockSave:
    """A save with stock DCP's writer, as many ranks would make it that have a little each: files have to be small."""

    def __init__(self, planner: ConvertingPlanner) -> None:
        self._planner = planner
        self.names: list[str] = []

    def run(self, directory: str, temporary: str, path: str) -> bytes:
        writer, planner = FileSystemWriter(directory, thread_count=1), self._planner
        planner.set_up_planner({}, is_coordinator=True)
        plans, metadata = planner.create_global_plan(_parts(planner.create_local_plan()))
        writer.set_up_storage_writer(True)
        results = []
        for number, plan in enumerate(writer.prepare_global_plan(plans)):
            # the writer appends the number of the file, which is 0, and the suffix
            prefix = f"__{number}_0_{uuid.uuid4().hex[:-1]}"
            self.names.append(f"{prefix}0{DATA_FILE_SUFFIX}")
            storage = dataclasses.replace(plan.storage_data, prefix=prefix)
            results.append(writer.write_data(dataclasses.replace(plan, storage_data=storage), planner).wait())
        finishing = _Finishing(path, temporary)
        finishing.set_up_storage_writer(True)
        finishing.finish(metadata, results)
        return (Path(temporary) / METADATA_NAME).read_bytes()


class _Finishing(FileSystemWriter):
    """Makes `.metadata` of a checkpoint that is at another place."""

    def __init__(self, path: str, temporary: str) -> None:
        super().__init__(temporary)
        self._place = without_secrets(path)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._place, save_id=self.save_id)


def _parts(plan: SavePlan) -> list[SavePlan]:
    parts, nbytes = [SavePlan([])], 0
    for item in plan.items:
        nbytes += planned_nbytes(item)
        if nbytes > _STOCK_FILE_NBYTES and parts[-1].items:
            parts.append(SavePlan([]))
            nbytes = planned_nbytes(item)
        parts[-1].items.append(item)
    return parts


def _save(writer: Any, planner: ConvertingPlanner) -> None:
    expect_no_group()
    try:
        dcp_save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise error_of_ranks(error, None) from error
