"""Saving, loading and corrupting of checkpoints in one process, for the tests of every folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader

from dcp_nvcomp import NvcompReader, NvcompWriter
from tests.states import State, assert_same, blank


def save(path: Path | str, state: State, **options: Any) -> NvcompWriter:
    """Save with a new writer that has these options, and return it."""
    writer = NvcompWriter(path, **options)
    state_dict_saver.save(state, storage_writer=writer, no_dist=True)
    return writer


def save_stock(path: Path | str, state: State, **options: Any) -> None:
    """Save with stock DCP's own writer."""
    state_dict_saver.save(state, storage_writer=FileSystemWriter(path, **options), no_dist=True)


def load(path: Path | str, like: State, **options: Any) -> State:
    """Load into a blank state dict with the keys, shapes and dtypes of `like`, and return it."""
    return load_into(path, blank(like), **options)


def load_into(path: Path | str, into: State, **options: Any) -> State:
    """Load with a new reader that has these options into a destination that matters, and return it."""
    state_dict_loader.load(into, storage_reader=NvcompReader(path, **options), no_dist=True)
    return into


def assert_loads(path: Path | str, expected: State, **options: Any) -> None:
    """Fail unless a reader with these options loads exactly what is expected."""
    assert_same(load(path, expected, **options), expected)


def assert_holds(reader: StorageReader, expected: State, **options: Any) -> None:
    """Fail unless this reader, of any plugin, loads exactly what is expected; the options are those of `dcp.load`."""
    into = blank(expected)
    state_dict_loader.load(into, storage_reader=reader, **options)
    assert_same(into, expected)


def data_file(path: Path) -> Path:
    """Return the only data file of a checkpoint."""
    (found,) = path.glob("*.distcp")
    return found


def file_names(path: Path) -> set[str]:
    """Return the names of everything in a directory; none if there is no such directory."""
    return {entry.name for entry in path.iterdir()} if path.exists() else set()


def flip(file: Path, position: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file."""
    data = bytearray(file.read_bytes())
    data[position] ^= mask
    file.write_bytes(data)


def damage(path: Path) -> None:
    """Flip bits of a byte in the middle of the largest data file of a checkpoint."""
    file = max(path.glob("*.distcp"), key=lambda one: one.stat().st_size)
    flip(file, file.stat().st_size // 2, 0xFF)


def failure_of(run: Callable[[], Any]) -> BaseException:
    """Return the error that DCP reports of rank 0."""
    with pytest.raises(CheckpointException) as caught:
        run()
    return caught.value.failures[0][0]
