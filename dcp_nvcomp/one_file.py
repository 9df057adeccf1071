"""One compressed file for what people give to torch.save, under the names of NVIDIA's recipe.

It is a data file, whose last record is the skeleton of the state:

    dicts, lists, tuples  ->  {"dict": [[key, part], ...]}, {"list": [...]}, {"tuple": [...]}
    tensors               ->  {"tensor": number}, the same elements of memory once, so that what is tied stays tied
    anything else         ->  {"value": it}, pickled with the skeleton
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.utils._pytree import tree_map_only

from dcp_nvcomp.engines.tensors import is_transparent, memory_of, torch_dtype
from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError, FormatError
from dcp_nvcomp.format.data_file import DataFileRef, find_data_file, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import Shard, StoredAt
from dcp_nvcomp.format.names import ONE_FILE_KEY, STREAM_KEY
from dcp_nvcomp.format.recognition import recognize
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, Record
from dcp_nvcomp.loading.items import load_items
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.options import parent_and_name
from dcp_nvcomp.reading.stored_tensor import Destinations, items_of_object
from dcp_nvcomp.saving.encode.objects import serialized
from dcp_nvcomp.saving.lone_file import write_file
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.streams.reader import StreamIndex, StreamReader


def save_compressed_checkpoint(
    state: Any, path: str | os.PathLike[str], *, overwrite: bool = True, **writer_options: Any
) -> None:
    """Save what one would give to `torch.save` into one compressed file.

    Tensors are compressed as in checkpoints; everything else is pickled. On local disks and object stores the file
    appears once it is complete; on a disk, a save that is killed leaves `NAME.<id>.tmp` beside it. Tied tensors, which
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
    parts = take_apart(state)
    skeleton = _pickled({"state": parts.skeleton, "keys": list(parts.tensors)})
    write_file(path, parts.tensors, ONE_FILE_KEY, lambda: skeleton, overwrite=overwrite, **writer_options)


def _pickled(skeleton: Any) -> bytes:
    try:
        return serialized(skeleton).getvalue()
    except Exception as error:  # pickle lets through whatever an object's own methods raise
        raise CheckpointError(
            f"A value can't be pickled, so the state can't be saved: {type(error).__name__}: {error}"
        ) from error


def load_compressed_checkpoint(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu", **reader_options: Any
) -> Any:
    """Load a file of `save_compressed_checkpoint`, or one of torch.save that was compressed as a stream.

    Values other than tensors are loaded with `weights_only=True`.

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
        if any(record.fqn == STREAM_KEY and record.kind == KIND_BYTES for record in footer.records):
            index = StreamIndex.read(filesystem, file, reader.load_options)
            with StreamReader(filesystem, index, reader.load_options) as stream:
                data = stream.readall()
            if not data.startswith(b"PK"):
                raise FormatError("What was compressed here is no file of torch.save.", path=footer.path)
            state = reader.load_options.safe.load_object(io.BytesIO(data), STREAM_KEY)
            try:
                return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), state)
            except RecursionError:
                raise CheckpointError("The state is nested too deeply, or contains itself.", path=footer.path) from None
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
            f"The skeleton of the state is invalid: {type(error).__name__}: {error}", path=footer.path
        ) from error


def _say_what_it_is(filesystem: Filesystem, path: str, error: CheckpointError) -> None:
    """Let the error say what is at the path, if that is another kind of file."""
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
            items.append(Wanted(_item_to_read(number, record), stored, shard))
        elif record.kind == KIND_BYTES and record.fqn == ONE_FILE_KEY:
            (item,) = items_of_object(ONE_FILE_KEY)
            items.append(Wanted(item, stored, None))
        else:
            raise FormatError("This is not a file of save_compressed_checkpoint.", path=footer.path, fqn=record.fqn)

    def take(_: str, data: io.BytesIO) -> None:
        skeletons.append(reader.load_options.safe.load_object(data, ONE_FILE_KEY))

    by_key = {str(number): tensor for number, tensor in tensors.items()}
    load_items(filesystem, items, Destinations(by_key, take), reader.load_options, footers=lambda *_: [footer])
    if len(skeletons) != 1:
        raise FormatError("This is not a file of save_compressed_checkpoint: it has no skeleton.", path=footer.path)
    skeleton = skeletons[0]
    order = {record.fqn: tensors[number] for number, record in records if number in tensors}
    try:
        return [order[key] for key in skeleton["keys"]], skeleton["state"]
    except (KeyError, TypeError) as error:
        raise FormatError("The skeleton of the state names tensors that are not there.", path=footer.path) from error


def _item_to_read(number: int, record: Record) -> ReadItem:
    origin = torch.Size([0] * len(record.shape))
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(str(number)),
        origin,
        MetadataIndex(record.fqn, origin),
        origin,
        torch.Size(record.shape),
    )


@dataclass(frozen=True)
class Parts:
    """A state in parts."""

    skeleton: Any  # nested plain containers
    tensors: Mapping[str, torch.Tensor]  # by key; the skeleton has their positions


def take_apart(state: Any) -> Parts:
    """Return a state in parts; nothing is copied."""
    taker = _Taker()
    try:
        return Parts(taker.part(state, ""), taker.tensors)
    except RecursionError:
        raise CheckpointError(
            "The state is nested too deeply, or contains itself, so it can't be saved: flatten it, or save parts of it."
        ) from None


class _Taker:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._numbers: dict[Hashable, int] = {}

    def part(self, value: Any, key: str) -> dict[str, Any]:
        kind = type(value)
        if kind in (dict, OrderedDict):
            name = "dict" if kind is dict else "ordered"
            return {name: [[one, self.part(part, _below(key, one))] for one, part in value.items()]}
        if kind in (list, tuple):
            return {kind.__name__: [self.part(one, _below(key, at)) for at, one in enumerate(value)]}
        if kind in (torch.Tensor, torch.nn.Parameter) and is_transparent(value) and value.layout == torch.strided:
            return self._tensor(value, key)
        return {"value": value}

    def _tensor(self, tensor: torch.Tensor, key: str) -> dict[str, Any]:
        memory = memory_of(tensor)
        number = self._numbers.get(memory)
        if number is None:
            number = self._numbers[memory] = len(self.tensors)
            self.tensors[_unused(key or "state", self.tensors)] = tensor
        found: dict[str, Any] = {"tensor": number}
        if isinstance(tensor, torch.nn.Parameter):
            found["parameter"] = True
        if tensor.requires_grad:
            found["requires_grad"] = True
        return found


def _below(key: str, part: object) -> str:
    return f"{key}.{part}" if key else str(part)


def _unused(key: str, used: Mapping[str, Any]) -> str:
    """Return a key that is not used yet: keys such as 1 and "1" look alike."""
    number, found = 1, key
    while found in used:
        number, found = number + 1, f"{key}#{number}"
    return found


def together(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the state."""
    made: dict[tuple[int, bool, bool], torch.Tensor] = {}

    def build(part: Any) -> Any:
        if "dict" in part:
            return {key: build(one) for key, one in part["dict"]}
        if "ordered" in part:
            return OrderedDict((key, build(one)) for key, one in part["ordered"])
        if "list" in part:
            return [build(one) for one in part["list"]]
        if "tuple" in part:
            return tuple([build(one) for one in part["tuple"]])
        if "tensor" in part:
            return tensor(part)
        return part["value"]

    def tensor(part: Any) -> torch.Tensor:
        number = int(part["tensor"])
        is_parameter, has_gradient = bool(part.get("parameter")), bool(part.get("requires_grad"))
        found = made.get((number, is_parameter, has_gradient))
        if found is None:
            found = tensors[number].detach()  # objects of their own that share the memory
            found = torch.nn.Parameter(found, has_gradient) if is_parameter else found.requires_grad_(has_gradient)
            made[number, is_parameter, has_gradient] = found
        return found

    return build(skeleton)
