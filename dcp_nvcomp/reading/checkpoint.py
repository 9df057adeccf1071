"""A checkpoint opened for reading, without a process group and without a state dict to load into.

Opening reads `.metadata` alone, each footer is read once, when it is first needed. Several threads may read at once,
and so may forked processes, each of which opens the storage anew.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_nvcomp.calls.suggestions import missing_key
from dcp_nvcomp.calls.tables import Shown, Table, counted, left
from dcp_nvcomp.engines.tensors import dtype_name
from dcp_nvcomp.errors import (
    CheckpointError,
    ConfigurationError,
    MetadataError,
    MissingKeyError,
    ShapeMismatchError,
)
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.data_file import DataFileRef, read_footers
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import ShardIndex, StoredAt
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.loading.items import load_items
from dcp_nvcomp.loading.job import LoadOptions
from dcp_nvcomp.loading.read_plan import Wanted, refuse_shared_elements
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.loading.safe_objects import SafeLoader
from dcp_nvcomp.options import DtypePolicy, check_choice
from dcp_nvcomp.reading.modules import load_into_module
from dcp_nvcomp.reading.stored_tensor import Destinations, Selection, StoredTensor, items_of_box, items_of_object
from dcp_nvcomp.storage.base import Filesystem

Framework = Literal["torch", "numpy"]

_AT_ONCE_NBYTES = 64 << 20


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    framework: Framework = "torch",
    device: torch.device | str = "cpu",
    **reader_options: Any,
) -> Checkpoint:
    """Open a checkpoint, of this package or of stock DCP, to read parts of it. No code in it is run.

    Args:
        path: a local path or any fsspec URL.
        framework: what tensors are read into: `"torch"`, or `"numpy"`, which has no bfloat16 and no float8.
        device: where torch tensors are put.
        **reader_options: of the `NvcompReader` that reads it, such as `verify`, and of the storage.

    Raises:
        ConfigurationError: an option can't work or is unknown.
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointError: its metadata can't be read.

    Examples:
        >>> import tempfile, torch, dcp_nvcomp
        >>> path = tempfile.mkdtemp()
        >>> _ = dcp_nvcomp.save({"w": torch.arange(12).reshape(4, 3)}, path, no_dist=True)
        >>> with dcp_nvcomp.open_checkpoint(path) as checkpoint:
        ...     checkpoint["w"][1:3, -1]
        tensor([5, 8])
    """
    return Checkpoint(path, framework=framework, device=device, **reader_options)


class Checkpoint(Shown, Mapping[str, Any]):
    """A checkpoint opened for reading: a mapping from keys to stored tensors and Python objects.

    Made by `open_checkpoint`. It can be pickled and used after a fork, and is closed at the end of a `with` statement.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, framework: Framework, device: torch.device | str, **reader_options: Any
    ) -> None:
        self._framework = check_choice("framework", framework, Framework)
        self._device = torch.device(device)
        if self._framework == "numpy" and self._device.type != "cpu":
            raise ConfigurationError(f"numpy arrays can't be on {device}: leave device= out.")
        if "safe_objects" in reader_options:
            raise ConfigurationError("open_checkpoint has no option 'safe_objects': Python objects are always checked.")
        self._reader = NvcompReader(path, safe_objects=True, **reader_options)
        self._metadata = self._reader.read_metadata()
        if self._metadata.storage_data is None:
            raise MetadataError("`.metadata` does not say where anything is stored.", path=self._reader.path)
        self._shards = ShardIndex(self._metadata.state_dict_metadata)
        self._opened: _OpenedStorage | None = _OpenedStorage(self._reader)

    @property
    def path(self) -> str:
        """The checkpoint, without passwords."""
        return self._reader.checkpoint_id

    @property
    def metadata(self) -> Metadata:
        """DCP's metadata: keys, shapes, dtypes and shards."""
        return self._metadata

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self._metadata.state_dict_metadata)

    def __contains__(self, key: object) -> bool:
        return key in self._metadata.state_dict_metadata

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r}: {len(self)} keys>"

    def shown(self) -> Iterator[str | Table]:
        """Return what it prints: its keys, with the dtypes and shapes of tensors."""
        yield f"{self.path}: {counted(len(self), 'key')}"
        rows = [
            (key, dtype_name(item.properties.dtype), str(list(item.size)))
            if isinstance(item, TensorStorageMetadata)
            else (key, "object", "")
            for key, item in self._metadata.state_dict_metadata.items()
        ]
        yield Table([left("key"), left("dtype"), left("shape")], rows)

    def __getitem__(self, key: str) -> Any:
        """Return a tensor, of which nothing is read yet, or a Python object.

        Raises:
            MissingKeyError: there is no such key; also a `KeyError`.
            UnsafeObjectError: the object would run code.
        """
        stored = self.stored(key)
        return self.read_into({}, [key])[key] if stored is None else stored

    def stored(self, key: str) -> StoredTensor | None:
        """Return a tensor, of which nothing is read yet; None for a Python object, which is not read either.

        Raises:
            MissingKeyError: there is no such key.
        """
        described = self._described(key)
        return StoredTensor(key, described, self._selected) if isinstance(described, TensorStorageMetadata) else None

    def _described(self, key: str) -> Any:
        try:
            return self._metadata.state_dict_metadata[key]
        except KeyError:
            raise MissingKeyError(
                missing_key(key, self._metadata.state_dict_metadata, nests=False), path=self.path
            ) from None

    def in_file_order(self, keys: Iterable[str] | None = None) -> list[str]:
        """Return keys in the order in which they are stored, in which reading them is quickest.

        Args:
            keys: by default all.
        """
        assert self._metadata.storage_data is not None
        first: dict[str, tuple[Any, ...]] = {}
        for index, stored in self._metadata.storage_data.items():
            is_ours = isinstance(stored, StoredAt)
            place = (stored.file.name, stored.record) if is_ours else (stored.relative_path, stored.offset)
            first[index.fqn] = min(place, first.get(index.fqn, place))
        wanted = list(self if keys is None else keys)
        return sorted(wanted, key=lambda key: (first.get(key, ("", 0)), key))

    def file_names(self) -> set[str]:
        """Return the names of the files that hold it: of `.metadata`, and of those with data."""
        places = (self._metadata.storage_data or {}).values()
        data = {stored.file.name if isinstance(stored, StoredAt) else stored.relative_path for stored in places}
        return {METADATA_NAME, *data}

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read several tensors and objects at once, which is quicker than one after the other.

        Args:
            keys: which.

        Returns:
            Their values, by key.

        Raises:
            MissingKeyError: there is no such key.
            CheckpointError: one of them can't be read.
        """
        wanted = list(dict.fromkeys(keys))
        tensors = {
            key: self._empty(described, described.size)
            for key in wanted
            if isinstance(described := self._described(key), TensorStorageMetadata)
        }
        objects = self.read_into(tensors, [key for key in wanted if key not in tensors])
        return {key: self._finished(tensors[key], key) if key in tensors else objects[key] for key in wanted}

    def read_into(self, tensors: Mapping[str, torch.Tensor], objects: Iterable[str] = ()) -> dict[str, Any]:
        """Read whole tensors into given ones, and return objects.

        Args:
            tensors: by key, of the stored shape; written where they are, and converted if their dtype is another.
            objects: keys of Python objects.

        Raises:
            MissingKeyError: there is no such key.
            ShapeMismatchError: a tensor has another shape, or a Python object was saved.
            ConfigurationError: a tensor has no memory of its own for each element.
            CheckpointError: one of them can't be read. The contents of the tensors are undefined then.
        """
        found: dict[str, Any] = {}

        def take(key: str, data: io.BytesIO) -> None:
            found[key] = self._reader.load_options.safe.load_object(data, key)

        items = [item for key in objects for item in items_of_object(key)]
        for key, tensor in tensors.items():
            described = self._described(key)
            if not isinstance(described, TensorStorageMetadata):
                raise ShapeMismatchError("A Python object was saved.", path=self.path, fqn=key)
            if described.size != tensor.shape:
                message = f"The destination has shape {tuple(tensor.shape)}, but {tuple(described.size)} was saved."
                raise ShapeMismatchError(message, path=self.path, fqn=key)
            if tensor.is_meta:
                raise ConfigurationError("The destination is on the meta device, which holds no values.", fqn=key)
            refuse_shared_elements(tensor, key)
            items += items_of_box(key, described, Box((0,) * tensor.dim(), tuple(described.size)), path=self.path)
        self._load(items, Destinations(tensors, take))
        return found

    def read_stored_object(self, key: str) -> bytes:
        """Return a Python object as it is stored, which is as `torch.save` wrote it. It is not loaded.

        Args:
            key: its key.
        """
        found: list[bytes] = []
        options = self._reader.load_options
        unchecked = replace(options, safe=SafeLoader(self._reader.trusted_globals, check_objects=False))
        take = Destinations({}, lambda _, data: found.append(data.getvalue()))
        self._load(items_of_object(key), take, unchecked)
        return found[0]

    def stream(self, keys: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
        """Read tensors and objects one after the other, in the order in which they are stored.

        Args:
            keys: which; by default all.

        Yields:
            Key and value. Some are read ahead: up to 64 MiB, or one tensor if it is larger.
        """
        for group in self.groups(keys):
            values = self.read(group)
            for key in group:
                yield key, values.pop(key)  # of which nothing is held here any more

    def groups(self, keys: Iterable[str] | None = None) -> Iterator[list[str]]:
        """Yield keys in file order, as many at once as hold 64 MiB, or one that is larger.

        Args:
            keys: which; by default all.
        """
        group: list[str] = []
        nbytes = 0
        for key in self.in_file_order(keys):
            stored = self.stored(key)
            size = 0 if stored is None else stored.nbytes
            if group and nbytes + size > _AT_ONCE_NBYTES:
                yield group
                group, nbytes = [], 0
            group.append(key)
            nbytes += size
        if group:
            yield group

    def dataset(self, keys: Iterable[str] | None = None) -> torch.utils.data.Dataset[tuple[str, Any]]:
        """Return a map-style dataset of (key, value) in file order, for a `torch.utils.data.DataLoader`.

        Args:
            keys: which; by default all.
        """
        return _KeysAndValues(self, self.in_file_order(keys))

    def load_into(self, module: torch.nn.Module, *, prefix: str = "", dtype: DtypePolicy = "same") -> None:
        """Load the parameters and buffers of a plain module, also of one on the meta device.

        Buffers that are not in its state dict (`persistent=False`) are not in a checkpoint either: make them yourself,
        if the module is on the meta device, as they stay there.

        Args:
            module: what to load into. Tensors on the meta device are replaced by ones on this checkpoint's device.
            prefix: what the module's keys begin with in the checkpoint, such as `"model."`.
            dtype: `"same"` refuses a stored dtype other than the module's, `"cast"` converts.

        Raises:
            MissingKeyError: the checkpoint lacks a key of the module.
            ShapeMismatchError: a tensor has another shape.
            DtypeMismatchError: a tensor has another dtype, with `dtype="same"`.
            CheckpointError: it can't be read. The contents of the module are undefined then.
        """
        load_into_module(self, module, prefix=prefix, dtype=dtype, device=self._device)

    def _selected(self, key: str, described: TensorStorageMetadata, selection: Selection) -> Any:
        tensor = self._empty(described, selection.box.sizes)
        items = items_of_box(key, described, selection.box, path=self.path)
        self._load(items, Destinations({key: tensor}))
        return self._finished(tensor if selection.is_whole_box else tensor[selection.taken], key)

    def _empty(self, described: TensorStorageMetadata, size: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=described.properties.dtype, device=self._device)

    def _finished(self, tensor: torch.Tensor, key: str) -> Any:
        if self._framework == "torch":
            return tensor
        try:
            return tensor.numpy()
        except TypeError as error:
            raise ConfigurationError(f"{error}: open the checkpoint with framework='torch'.", fqn=key) from error

    def _load(self, items: Sequence[Any], destinations: Destinations, options: LoadOptions | None = None) -> None:
        opened = self._open()
        assert self._metadata.storage_data is not None
        wanted = []
        for item in items:
            stored = self._metadata.storage_data.get(item.storage_index)
            if stored is None:
                raise MetadataError(
                    f"`.metadata` does not say where the shard at {item.storage_index.offset} is.",
                    path=self.path,
                    fqn=item.storage_index.fqn,
                )
            wanted.append(Wanted.of(item, stored, self._shards))
        options = options or self._reader.load_options
        load_items(opened.filesystem, wanted, destinations, options, footers=opened.footers)

    def _open(self) -> _OpenedStorage:
        opened = self._opened
        if opened is None:
            raise CheckpointError("It is closed.", path=self.path)
        if opened.pid != os.getpid():  # after a fork, connections and locks are the parent's
            opened = self._opened = _OpenedStorage(self._reader)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opened=_OpenedStorage(state["_reader"]))

    def close(self) -> None:
        """Close the storage. What was read stays."""
        opened, self._opened = self._opened, None
        if opened is not None and opened.pid == os.getpid():
            opened.filesystem.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _KeysAndValues(torch.utils.data.Dataset[tuple[str, Any]]):
    def __init__(self, checkpoint: Checkpoint, keys: Sequence[str]) -> None:
        self._checkpoint, self._keys = checkpoint, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> tuple[str, Any]:
        key = self._keys[number]
        return key, self._checkpoint.read([key])[key]


class _OpenedStorage:
    """The storage as one process has opened it, and the footers that were read."""

    def __init__(self, reader: NvcompReader) -> None:
        self.pid = os.getpid()
        self.filesystem = reader.open_storage()
        self._footers: dict[DataFileRef, Footer] = {}
        self._lock = threading.Lock()

    def footers(self, filesystem: Filesystem, files: Sequence[DataFileRef]) -> list[Footer]:
        with self._lock:
            known = {file: self._footers[file] for file in files if file in self._footers}
        missing = [file for file in files if file not in known]
        if missing:
            known.update(zip(missing, read_footers(filesystem, missing), strict=True))
            with self._lock:
                self._footers.update(known)
        return [known[file] for file in files]
