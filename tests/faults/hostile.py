"""A small checkpoint to be made hostile, and what loading it does."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.format.names import METADATA_NAME

__all__ = ["STATE", "data_file", "load", "peak_nbytes", "refusal", "republish", "save"]

STATE = {"w": torch.arange(4096.0) % 7}


def save(path: Path, state: dict[str, Any] | None = None, **options: Any) -> Path:
    dcp.save(state or STATE, storage_writer=NvcompWriter(path, **options), no_dist=True)
    return path


def load(path: Path, into: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    into = into or {"w": torch.zeros(4096)}
    dcp.load(into, storage_reader=NvcompReader(path, **options), no_dist=True)
    return into


def refusal(path: Path, into: dict[str, Any] | None = None, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load(path, into, **options)
    return caught.value.failures[0][0]


def data_file(path: Path) -> Path:
    return next(path.glob("**/*.distcp"))


def republish(path: Path, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Another file tuple for all records."""
    metadata = parse_metadata((path / METADATA_NAME).read_bytes(), path="")
    new = {index: (change(file), record) for index, (file, record) in metadata.storage_data.items()}
    metadata.storage_data = new
    (path / METADATA_NAME).write_bytes(serialize_metadata(metadata))


def peak_nbytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
