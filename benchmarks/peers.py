"""The writers and readers that are compared: this project, and DCP's own, plain and with its zstd extension."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard  # stock's own; it has no public name
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter  # nor have these

import dcp_nvcomp
from benchmarks.states import State
from dcp_nvcomp import NvcompReader, NvcompWriter

__all__ = ["Peer", "data_nbytes", "load", "ours", "plain_calls", "remove", "save", "stock", "stock_fsspec"]


def _dcp_save(state: State, writer: dcp.StorageWriter) -> None:
    dcp.save(state, storage_writer=writer, no_dist=True)


def _dcp_load(into: State, reader: dcp.StorageReader) -> None:
    dcp.load(into, storage_reader=reader, no_dist=True)


@dataclass(frozen=True)
class Peer:
    """One way to save and load.

    Attributes:
        name: as tables and plots call it.
        threads: threads that it was given.
        writer: makes a writer for a path or URL.
        reader: makes a reader.
        save_with: saves with a writer, in this process alone.
        load_with: loads with a reader, in this process alone.
    """

    name: str
    threads: int
    writer: Callable[[str], dcp.StorageWriter]
    reader: Callable[[str], dcp.StorageReader]
    save_with: Callable[[State, Any], object] = _dcp_save
    load_with: Callable[[State, Any], object] = _dcp_load

    @property
    def label(self) -> str:
        """Name and threads: unique in a comparison."""
        return f"{self.name}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def ours(threads: int, *, codec: str = "auto", **options: Any) -> Peer:
    """This project; further options are those that writer and reader share, and storage options."""
    shared = {"thread_count": threads, **options}
    return Peer(
        "dcp_nvcomp",
        threads,
        lambda path: NvcompWriter(path, codec=codec, **shared),
        lambda path: NvcompReader(path, **shared),
    )


def plain_calls(peer: Peer) -> Peer:
    """`dcp_nvcomp.save` and `load` instead of DCP's."""
    return replace(
        peer,
        save_with=lambda state, writer: dcp_nvcomp.save(state, storage_writer=writer, no_dist=True),
        load_with=lambda into, reader: dcp_nvcomp.load(into, storage_reader=reader, no_dist=True),
    )


def stock(threads: int, *, zstd: bool = False) -> Peer:
    """DCP's own file-system writer. Its reader knows no threads: it loads with one."""
    extensions = {"_extensions": [ZStandard()]} if zstd else {}
    return Peer(
        "dcp+zstd" if zstd else "dcp",
        threads,
        lambda path: dcp.FileSystemWriter(path, thread_count=threads, **extensions),
        dcp.FileSystemReader,
    )


def stock_fsspec(threads: int, *, zstd: bool = False, **storage_options: Any) -> Peer:
    """DCP's own writer for URLs.

    `sync_files` is off, in its favour: where a stream has no descriptor to sync, it syncs all disks of the machine.
    """
    extensions = {"_extensions": [ZStandard()]} if zstd else {}
    return Peer(
        "dcp+zstd" if zstd else "dcp",
        threads,
        lambda path: FsspecWriter(path, thread_count=threads, sync_files=False, **extensions, **storage_options),
        lambda path: FsspecReader(path, **storage_options),
    )


def save(peer: Peer, path: Path | str, state: State) -> dcp.StorageWriter:
    """Save in this process alone and return the writer, which holds the statistics."""
    writer = peer.writer(str(path))
    peer.save_with(state, writer)
    return writer


def load(peer: Peer, path: Path | str, into: State) -> None:
    """Load in this process alone."""
    peer.load_with(into, peer.reader(str(path)))


def data_nbytes(path: Path) -> int:
    """Bytes of the data files of a checkpoint."""
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def remove(path: Path) -> None:
    """Remove a checkpoint, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
