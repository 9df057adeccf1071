"""Files of `torch.save`. It takes the whole state at once, so all of it has to be in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.conversion.entries import ObjectEntry, TensorEntry
from dcp_nvcomp.errors import CheckpointExistsError, StorageError
from dcp_nvcomp.reading.nesting import nested
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of

__all__ = ["write_torch"]

_UPLOAD_NBYTES = 16 << 20


def write_torch(
    path: str,
    entries: Sequence[TensorEntry | ObjectEntry],
    moved: Callable[[int], None],
    *,
    overwrite: bool,
    storage_options: Mapping[str, Any],
) -> None:
    """Write a file of `torch.save` with nested dicts and lists; it appears once it is complete.

    Raises:
        CheckpointExistsError: there is such a file, and it may not be replaced.
        UnsafeObjectError: an object would run code when it is loaded.
    """
    directory, name = parent_and_name(path)
    filesystem = open_filesystem(directory, storage_options=storage_options)
    try:
        filesystem.create_directory()
        if not overwrite and filesystem.file_nbytes(name) is not None:
            raise CheckpointExistsError("There is such a file already.", path=filesystem.location(name))
        values: dict[str, Any] = {}
        for entry in entries:
            if isinstance(entry, TensorEntry):
                values[entry.key] = entry.read_all()
                moved(values[entry.key].nbytes)
            else:
                values[entry.key] = entry.reader.value()
        state = nested({entry.key: entry.path for entry in entries}, values)
        is_local = isinstance(filesystem, PosixFilesystem)
        where = os.path.dirname(place_of(path)) if is_local else None
        with tempfile.NamedTemporaryFile(dir=where, prefix=".dcp_nvcomp_", delete=False) as file:
            try:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                if is_local:
                    os.chmod(file.name, 0o666 & ~_umask())
                    os.replace(file.name, place_of(path))
                    return
                _upload(filesystem, name, file.name)
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError.from_os_error("write", filesystem.location(name), error) from error
            finally:
                if os.path.exists(file.name):
                    os.unlink(file.name)
    finally:
        filesystem.close()


def _umask() -> int:
    """Return the process's mask for new files, which can only be asked for by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _upload(filesystem: Any, name: str, local: str) -> None:
    filesystem.remove([name])
    output = filesystem.open_output(name)
    try:
        with open(local, "rb") as opened:
            while data := opened.read(_UPLOAD_NBYTES):
                output.write(data)
        output.close()
    except BaseException:
        output.abort()
        raise
