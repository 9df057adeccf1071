"""Checkpoints of this package, and of stock DCP, which torch's own readers read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_nvcomp.calls.ranks import error_of_ranks
from dcp_nvcomp.conversion.entries import ObjectEntry, TensorEntry
from dcp_nvcomp.conversion.targets.planner import ConvertingPlanner
from dcp_nvcomp.errors import CheckpointExistsError
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of

__all__ = ["write_dcp", "write_ours"]

_HOST_MEMORY_NBYTES = 48 << 20
_UPLOAD_NBYTES = 16 << 20

Entries = Sequence[TensorEntry | ObjectEntry]
Moved = Callable[[int], None]


def write_ours(
    path: str, entries: Entries, moved: Moved, *, codec: Any, overwrite: bool, storage_options: Mapping[str, Any]
) -> None:
    """Write a checkpoint of this package; it appears once it is complete."""
    writer = NvcompWriter(
        path,
        codec=codec,
        overwrite=overwrite,
        engine="cpu",
        thread_count=min(2, os.cpu_count() or 1),
        host_memory_budget=_HOST_MEMORY_NBYTES,
        **storage_options,
    )
    _save(writer, entries, moved)


def write_dcp(
    path: str, entries: Entries, moved: Moved, *, overwrite: bool, storage_options: Mapping[str, Any]
) -> None:
    """Write a checkpoint of stock DCP, with its own writer; elsewhere than on disk by way of a temporary directory."""
    filesystem = open_filesystem(path, storage_options=storage_options)
    try:
        if not overwrite and filesystem.file_nbytes(METADATA_NAME) is not None:
            raise CheckpointExistsError("There is a checkpoint already.", path=filesystem.path)
        if isinstance(filesystem, PosixFilesystem):
            _save(FileSystemWriter(place_of(path), thread_count=1), entries, moved)
            return
        with tempfile.TemporaryDirectory(prefix="dcp_nvcomp_") as directory:
            _save(FileSystemWriter(directory, thread_count=1), entries, moved)
            for file in sorted(Path(directory).glob("*.distcp")):
                output = filesystem.open_output(file.name)
                try:
                    with file.open("rb") as opened:
                        while data := opened.read(_UPLOAD_NBYTES):
                            output.write(data)
                    output.close()
                except BaseException:
                    output.abort()
                    raise
            filesystem.publish(METADATA_NAME, (Path(directory) / METADATA_NAME).read_bytes(), overwrite=overwrite)
    finally:
        filesystem.close()


def _save(writer: Any, entries: Entries, moved: Moved) -> None:
    try:
        dcp_save({}, storage_writer=writer, planner=ConvertingPlanner(entries, moved), no_dist=True)
    except CheckpointException as error:
        raise error_of_ranks(error, None) from error
