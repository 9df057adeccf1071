"""Checkpoints of this package, and of stock DCP, which torch's own readers read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_nvcomp.calls.ranks import error_of_ranks, group_of
from dcp_nvcomp.conversion.entries import ObjectEntry, TensorEntry
from dcp_nvcomp.conversion.targets.planner import ConvertingPlanner
from dcp_nvcomp.errors import CheckpointExistsError
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.saving.file_plan import planned_nbytes
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of

__all__ = ["write_dcp", "write_ours"]

_HOST_MEMORY_NBYTES = 48 << 20
_UPLOAD_NBYTES = 16 << 20
_STOCK_FILE_NBYTES = 64 << 20

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
            _save_stock(place_of(path), entries, moved)
            return
        with tempfile.TemporaryDirectory(prefix="dcp_nvcomp_") as directory:
            _save_stock(directory, entries, moved)
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


def _save_stock(directory: str, entries: Entries, moved: Moved) -> None:
    """Save with stock DCP's writer, as many ranks would that have a little each.

    It holds what it has written of each key until its file is complete, so files have to be small.
    """
    writer, planner = FileSystemWriter(directory, thread_count=1), ConvertingPlanner(entries, moved)
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan(_parts(planner.create_local_plan()))
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plans[0]), *plans[1:]])
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    writer.finish(metadata, results)


def _parts(plan: SavePlan) -> list[SavePlan]:
    parts, nbytes = [SavePlan([])], 0
    for item in plan.items:
        nbytes += planned_nbytes(item)
        if nbytes > _STOCK_FILE_NBYTES and parts[-1].items:
            parts.append(SavePlan([]))
            nbytes = planned_nbytes(item)
        parts[-1].items.append(item)
    return parts


def _save(writer: Any, entries: Entries, moved: Moved) -> None:
    alone = group_of(None, no_dist=True) is None
    try:
        dcp_save({}, storage_writer=writer, planner=ConvertingPlanner(entries, moved), no_dist=alone)
    except CheckpointException as error:
        raise error_of_ranks(error, None) from error
