"""The values of `storage_data`: which file holds an item, and where.

    in memory   StoredAt(DataFileRef(...), record)         ours
                StockItem(relative_path, offset, ...)      stock DCP's
    on disk     ((name, nbytes, footer_nbytes, footer_crc), record), plain tuples, so that torch alone can unpickle them

All items of a data file share one tuple by identity, so that pickle writes it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_nvcomp.format.data_file import DataFileRef

PlainStoredAt = tuple[tuple[str, int, int, int], int]


class StoredAt(NamedTuple):
    """The place of an item that this package wrote."""

    file: DataFileRef
    record: int  # the index of its record in that file's footer


@dataclass(frozen=True, slots=True)
class StockItem:
    """The place of an item that stock DCP wrote."""

    relative_path: str
    offset: int  # the item's first byte in it
    length: int  # its stored size in bytes
    transform_descriptors: tuple[str, ...]  # the transforms it went through, in the order in which reading undoes them


def plain_storage_data(storage_data: Mapping[MetadataIndex, Any]) -> dict[MetadataIndex, PlainStoredAt]:
    """Return `storage_data` as it is pickled: each `StoredAt` as plain tuples, one for each file."""
    files: dict[int, tuple[str, int, int, int]] = {}  # by the id of what is shared
    plain: dict[MetadataIndex, PlainStoredAt] = {}
    for index, value in storage_data.items():
        assert isinstance(value, tuple), "only what this package wrote is written"
        file, record = value
        plain[index] = (files.setdefault(id(file), tuple(file)), record)
    return plain
