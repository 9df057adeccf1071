"""A small checkpoint to be made hostile, and what loading it does."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.format.names import METADATA_NAME
from tests.checkpoints import load_into, save
from tests.states import blank

STATE = {"w": torch.arange(4096.0) % 7}


def saved(path: Path, **options: Any) -> Path:
    """Save STATE, and return the path."""
    save(path, STATE, **options)
    return path


def refusal(path: Path, into: dict[str, Any] | None = None, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load_into(path, into or blank(STATE), **options)
    return caught.value.failures[0][0]


def cheap_refusal(path: Path, **options: Any) -> BaseException:
    """Return the refusal of a load that takes little memory for it."""
    found: list[BaseException] = []
    assert peak_nbytes(lambda: found.append(refusal(path, **options))) < 64 << 20
    return found[0]


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
