"""load_compressed_checkpoint: reads what save_compressed_checkpoint wrote."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.engines.tensors import torch_dtype
from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError, FormatError
from dcp_nvcomp.format.data_file import DataFileRef, find_data_file, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import Shard
from dcp_nvcomp.format.metadata.stored import StoredAt
from dcp_nvcomp.format.names import ONE_FILE_KEY
from dcp_nvcomp.format.recognition import recognize
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, Record
from dcp_nvcomp.loading.items import load_items
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.one_file.structure import together
from dcp_nvcomp.reading.items import Destinations
from dcp_nvcomp.storage.base import Filesystem


def load_compressed_checkpoint(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu", **reader_options: Any
) -> Any:
    """Load a file of `save_compressed_checkpoint`. Values other than tensors are loaded with `weights_only=True`.

    Args:
        path: of the file: a local path or any fsspec URL.
        device: where tensors are put.
        **reader_options: of `NvcompReader`, such as `verify` and `trusted_globals`, and of the storage.

    Returns:
        The state.

    Raises:
        ConfigurationError: an option can't work or is unknown.
        CheckpointNotFoundError: there is no such file.
        FormatError: it is another file.
        CorruptDataError: it is damaged.
        UnsafeObjectError: a value needs a class that is not in `trusted_globals`.
    """
    parent, name = parent_and_name(os.fspath(path))
    reader = NvcompReader(parent, safe_objects=True, **reader_options)
    filesystem = reader.open_storage()
    try:
        nbytes = filesystem.file_nbytes(name)
        if nbytes is None:
            raise CheckpointNotFoundError("There is no such file.", path=filesystem.location(name))
        file = find_data_file(filesystem, name, nbytes)
        footer = read_footer(filesystem, file)
        tensors, skeleton = _read(filesystem, reader, file, footer, torch.device(device))
    except (CheckpointNotFoundError, FormatError) as error:
        _say_what_it_is(filesystem, os.fspath(path), error)
        raise
    finally:
        filesystem.close()
    try:
        return together(skeleton, tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"The skeleton of the state is none: {type(error).__name__}: {error}", path=footer.path
        ) from error


def _say_what_it_is(filesystem: Filesystem, path: str, error: CheckpointError) -> None:
    """Let the error say what is at the path, if that is no file of save_compressed_checkpoint."""
    if filesystem.reopen is None:
        return
    with contextlib.suppress(CheckpointError), contextlib.closing(filesystem.reopen(path)) as there:
        found = recognize(there)
        if found.kind not in ("one file", "nothing"):
            error.fqn = error.byte_range = None
            error.message = f"This is {found.what}, not a file of save_compressed_checkpoint: {found.advice}."


def _read(
    filesystem: Filesystem, reader: NvcompReader, file: DataFileRef, footer: Footer, device: torch.device
) -> tuple[Sequence[torch.Tensor], Any]:
    records = [(number, record) for number, record in enumerate(footer.records) if record.fqn]
    tensors, items, skeletons = dict[int, torch.Tensor](), list[Wanted](), list[Any]()
    for number, record in records:
        stored = StoredAt(file, number)
        if record.kind == KIND_TENSOR:
            dtype = torch_dtype(record.element)
            tensors[number] = torch.empty(record.shape, dtype=dtype, device=device)
            shard = Shard(record.offsets, record.shape, record.global_shape, dtype)
            items.append(Wanted(_tensor_item(number, record), stored, shard))
        elif record.kind == KIND_BYTES and record.fqn == ONE_FILE_KEY:
            items.append(Wanted(_skeleton_item(), stored, None))
        else:
            raise FormatError("This is no file of save_compressed_checkpoint.", path=footer.path, fqn=record.fqn)

    def take(_: str, data: io.BytesIO) -> None:
        skeletons.append(reader.load_options.safe.load_object(data, ONE_FILE_KEY))

    by_key = {str(number): tensor for number, tensor in tensors.items()}
    load_items(filesystem, items, Destinations(by_key, take), reader.load_options, footers=lambda *_: [footer])
    if len(skeletons) != 1:
        raise FormatError("This is no file of save_compressed_checkpoint: it has no skeleton.", path=footer.path)
    skeleton = skeletons[0]
    order = {record.fqn: tensors[number] for number, record in records if number in tensors}
    try:
        return [order[key] for key in skeleton["keys"]], skeleton["state"]
    except (KeyError, TypeError) as error:
        raise FormatError("The skeleton of the state names tensors that are not there.", path=footer.path) from error


def _tensor_item(number: int, record: Record) -> ReadItem:
    origin = torch.Size([0] * len(record.shape))
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(str(number)),
        origin,
        MetadataIndex(record.fqn, origin),
        origin,
        torch.Size(record.shape),
    )


def _skeleton_item() -> ReadItem:
    none = torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(ONE_FILE_KEY), none, MetadataIndex(ONE_FILE_KEY), none, none)
