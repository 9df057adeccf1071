"""Files of `torch.save`, loaded with `weights_only=True` and mapped into memory; compressed ones are loaded whole.

`torch.save` takes the whole state at once, so to be written all of it has to be in memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dcp_nvcomp.calls.values import flatten, nested
from dcp_nvcomp.conversion.entries import ObjectEntry, Source, TensorEntry, exists_already, paths_in_order
from dcp_nvcomp.engines.tensors import memory_of
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptDataError,
    UnsafeObjectError,
)
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.recognition import linked_to
from dcp_nvcomp.loading.safe_objects import allowed_globals, check_file, what_it_needs
from dcp_nvcomp.one_file import load_compressed_checkpoint
from dcp_nvcomp.options import parent_and_name
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem, OutputStream
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of

_FETCH_NBYTES = 16 << 20
# Beyond both of these a file is refused: expanded tensors are common, but in such proportions an accident or worse.
_MOST_EXPANDED_NBYTES = 1 << 30
_MOST_EXPANSION = 16


class TorchFileSource(Source):
    """A file of `torch.save`."""

    def __init__(self, path: str, **storage_options: Any) -> None:
        self.path = without_secrets(path)
        path = linked_to(path)
        self.files = [path]
        parent, name = parent_and_name(path)
        filesystem = open_filesystem(parent, storage_options=storage_options)
        self._temporary: str | None = None
        try:
            nbytes = filesystem.file_nbytes(name)
            if nbytes is None:
                raise CheckpointNotFoundError("There is no such file.", path=self.path)
            if isinstance(filesystem, PosixFilesystem):
                local = place_of(path)
            else:
                local = self._temporary = _fetched(filesystem, name, nbytes)
            self._state, self._nbytes = _loaded(local, self.path), nbytes
        except BaseException:
            self.close()
            raise
        finally:
            filesystem.close()

    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        state = self._state if isinstance(self._state, Mapping) else {"state": self._state}
        try:
            flat = flatten(state)
        except RecursionError:
            raise CheckpointError("The state is nested too deeply, or contains itself.", path=self.path) from None
        except ConfigurationError as error:
            error.path = self.path
            raise
        found: list[TensorEntry | ObjectEntry] = []
        for key, value in flat.values.items():
            path = flat.paths[key]
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
                tensor = value.detach()
                read = partial(_read_box, tensor)
                found.append(TensorEntry(key, path, tuple(value.shape), value.dtype, read, memory=memory_of(tensor)))
            else:
                found.append(ObjectEntry(key, path, partial(_serialized, value), partial(_unchanged, value)))
        self._refuse_bombs([entry for entry in found if isinstance(entry, TensorEntry)])
        return found

    def _refuse_bombs(self, entries: Sequence[TensorEntry]) -> None:
        """Refuse tensors whose elements share memory so often that a small file would become a huge one."""
        total_nbytes = sum(entry.nbytes for entry in entries)
        if total_nbytes <= max(_MOST_EXPANDED_NBYTES, _MOST_EXPANSION * self._nbytes):
            return
        largest = max(entries, key=lambda entry: entry.nbytes)
        raise CheckpointError(
            f"It has {self._nbytes} bytes, and its tensors would have {total_nbytes}, this one {largest.nbytes}: their "
            "elements overlap in memory, as expand makes them. Save what they were expanded from.",
            path=self.path,
            fqn=largest.key,
        )

    def close(self) -> None:
        if self._temporary is not None:
            os.unlink(self._temporary)
            self._temporary = None


class CompressedFileSource(TorchFileSource):
    """A file of `save_compressed_checkpoint`, or what torch.save wrote as a compressed stream."""

    def __init__(self, path: str, **storage_options: Any) -> None:
        self.path, self.files, self._temporary = without_secrets(path), [linked_to(path)], None
        try:
            self._state = load_compressed_checkpoint(path, **storage_options)
        except UnsafeObjectError as error:
            raise UnsafeObjectError(f"The file needs a class that is not allowed. {_ADVICE}", path=self.path) from error
        except CheckpointError as error:
            error.path = error.path or self.path
            raise
        tensors = [one for one in tree_leaves(self._state) if isinstance(one, torch.Tensor)]
        memories = [one.untyped_storage() for one in tensors if one.layout == torch.strided]
        self._nbytes = sum({one.data_ptr(): one.nbytes() for one in memories}.values())  # once, where it is shared


def _fetched(filesystem: Filesystem, name: str, nbytes: int) -> str:
    with tempfile.NamedTemporaryFile(delete=False, prefix="dcp_nvcomp_", suffix=".pt") as file:
        try:
            for start in range(0, nbytes, _FETCH_NBYTES):
                shutil.copyfileobj(io.BytesIO(filesystem.read(name, start, min(start + _FETCH_NBYTES, nbytes))), file)
        except BaseException:
            os.unlink(file.name)
            raise
    return file.name


_ADVICE = "If you trust it, register its classes with torch.serialization.add_safe_globals."


def _loaded(local: str, path: str) -> Any:
    try:
        check_file(local)
    except CheckpointError as error:
        error.path = path
        raise
    try:
        with allowed_globals():
            return torch.load(local, map_location="cpu", weights_only=True, mmap=True)
    except (MemoryError, Warning):
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeObjectError(
            f"The file needs more than weights_only loading allows. {what_it_needs(error, _ADVICE)}",
            path=path,
        ) from error
    except Exception as error:  # torch.load raises almost anything for other files
        raise CorruptDataError(
            f"This is not a file of torch.save that can be mapped: {type(error).__name__}: {error}", path=path
        ) from error


def _read_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[box.index].clone(memory_format=torch.contiguous_format)


def _unchanged(value: Any) -> Any:
    return value


def _serialized(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def write_torch(
    path: str,
    entries: Sequence[TensorEntry | ObjectEntry],
    moved: Callable[[int], None],
    *,
    overwrite: bool,
    storage_options: Mapping[str, Any],
) -> None:
    """Write a file of `torch.save` with nested dicts and lists; it appears, or is replaced, once it is complete."""
    directory, name = parent_and_name(path)
    with contextlib.closing(open_filesystem(directory, storage_options=storage_options)) as filesystem:
        if not overwrite and filesystem.file_nbytes(name) is not None:
            raise exists_already(filesystem, name)
        state = nested(paths_in_order(entries), _values(entries, moved))
        filesystem.create_directory()
        with filesystem.open_replacement(name) as output:
            _save(state, output)


def _values(entries: Sequence[TensorEntry | ObjectEntry], moved: Callable[[int], None]) -> dict[str, Any]:
    """Read everything; what is tied in the source is one tensor."""
    values: dict[str, Any] = {}
    tied: dict[Hashable, torch.Tensor] = {}
    for entry in entries:
        if isinstance(entry, ObjectEntry):
            values[entry.key] = entry.value()
            continue
        tensor = None if entry.memory is None else tied.get((entry.memory, entry.dtype))
        if tensor is None:
            tensor = entry.read_all()
        if entry.memory is not None:
            tied[entry.memory, entry.dtype] = tensor
        values[entry.key] = tensor
        moved(tensor.nbytes)
    return values


def _save(state: Any, output: OutputStream) -> None:
    file = _File(output)
    try:
        torch.save(state, file)  # type: ignore[arg-type]  # it needs no more of a file than these methods
    except Exception:  # torch may raise another error than the one that stopped it
        if file.error is not None:
            raise file.error from None
        raise


class _File:
    """An output stream as `torch.save` writes to files: front to back."""

    def __init__(self, output: OutputStream) -> None:
        self._output = output
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            view = memoryview(data).cast("B")
            self._output.write(view)
        except BaseException as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        pass
