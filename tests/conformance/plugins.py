"""Pairs of writer and reader that the same tests run on, stock DCP first: what it does too is right by definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dcp_nvcomp import NvcompReader, NvcompWriter
from tests.distributed.launch import STOCK_WARNINGS


@dataclass(frozen=True)
class Plugin:
    """Makes the writers and readers of one test; picklable, so that ranks can."""

    name: str
    writes: str
    reads: str
    writer_options: dict[str, Any] = field(default_factory=dict, hash=False)
    reader_options: dict[str, Any] = field(default_factory=dict, hash=False)

    def writer(self, path: str | Path, **options: Any) -> StorageWriter:
        if self.writes == "ours":
            return NvcompWriter(path, **{"sync_files": False, **self.writer_options, **options})
        return FsspecWriter(path, **{"sync_files": False, **options})

    def reader(self, path: str | Path, **options: Any) -> StorageReader:
        if self.reads == "ours":
            return NvcompReader(path, **{**self.reader_options, **options})
        return FsspecReader(path, **options)

    def __str__(self) -> str:
        return self.name


STOCK = Plugin("stock", "stock", "stock")
# Stock against stock: CI sees that a test asks for what DCP does, `make test` need not each time.
ORACLE = pytest.param(STOCK, marks=pytest.mark.oracle)
OURS = Plugin("ours", "ours", "ours")
OURS_FROM_STOCK = Plugin("ours-from-stock", "stock", "ours")
OURS_BY_CODEC = [
    Plugin(f"ours-{codec}", "ours", "ours", {"codec": codec}, {"verify": "full"})
    for codec in ("planes-zstd", "planes-deflate", "zstd", "none")
]

# For what a save and a load do together, for what a save does, and for what a load does.
on_every_plugin = pytest.mark.parametrize("plugin", [ORACLE, OURS], ids=str)
on_every_reader = pytest.mark.parametrize("plugin", [ORACLE, OURS, OURS_FROM_STOCK], ids=str)

quiet_stock = [pytest.mark.filterwarnings(f"ignore:{message}") for message in STOCK_WARNINGS]


def cause_of(error: BaseException) -> BaseException:
    """Return what rank 0 raised inside a `CheckpointException`."""
    failures: dict[int, tuple[BaseException, Any]] = error.failures  # type: ignore[attr-defined]
    return failures[0][0]
