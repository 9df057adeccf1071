"""List the contents and sizes of a checkpoint from its metadata and footers; payloads are never read.

A tensor that lies in a pack is given its share of the pack's bytes, in proportion to its own size. Python objects and
payloads of stock checkpoints count as stored.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.filesize import decimal
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_nvcomp.calls.tables import Column, Shown, Table, counted, left
from dcp_nvcomp.engines.tensors import dtype_name
from dcp_nvcomp.errors import CheckpointNotFoundError, FileMismatchError, MetadataError, StorageError
from dcp_nvcomp.format.data_file import DataFileRef, read_footers
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import ShardIndex, StockItem, StoredAt
from dcp_nvcomp.format.names import shared_directories
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, Record
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.maintenance.lone_files import lone_file
from dcp_nvcomp.maintenance.opening import as_json, checked_storage_options, natural_order, opened
from dcp_nvcomp.saving.stats import Totals, table_of_totals
from dcp_nvcomp.storage.base import BESIDE, Filesystem

LAYOUT_OURS = "dcp_nvcomp"
LAYOUT_STOCK = "stock"
LAYOUT_FILE = "one file"
_WHOSE = {
    LAYOUT_OURS: "a dcp-nvcomp checkpoint",
    LAYOUT_STOCK: "a stock DCP checkpoint",
    LAYOUT_FILE: "a compressed file",
}


@dataclass(frozen=True)
class Item:
    """One key of the state dict, all its shards together."""

    fqn: str
    kind: str  # `tensor`, `bytes` (a Python object) or `torch_save` (a tensor stored as `torch.save` wrote it)
    dtype: str  # name of the dtype; `bytes` for a Python object
    shape: tuple[int, ...] | None  # the global shape; None for a Python object
    codecs: tuple[str, ...]
    packed: bool  # whether shards share a block with other small ones
    totals: Totals


@dataclass(frozen=True)
class DataFile:
    """One data file."""

    name: str  # its name in the checkpoint
    nbytes: int
    footer_nbytes: int  # size of its footer; 0 for stock files, which have none


@dataclass(frozen=True)
class Inspection(Shown):
    """Result of `inspect`.

    Attributes:
        path: the checkpoint.
        layout: `dcp_nvcomp`, `stock` for one that stock DCP wrote, or `one file`.
        save_id: id of the save, where there is one.
        items: the keys, in natural order.
        files: the data files that they are in, by name; `../step-900/...` are shared with a checkpoint beside it.
        shared: sums over the shards in files that it shares, by that checkpoint's directory.
        by_dtype: sums over all items by dtype.
        by_codec: sums over all items by codec.
    """

    path: str
    layout: str
    save_id: str | None
    items: tuple[Item, ...]
    files: tuple[DataFile, ...]
    by_dtype: dict[str, Totals]
    by_codec: dict[str, Totals]
    shared: dict[str, Totals] = field(default_factory=dict)

    @property
    def totals(self) -> Totals:
        """Sums over all items; footers and what else is in the files are not counted."""
        return sum((item.totals for item in self.items), Totals())

    @property
    def file_nbytes(self) -> int:
        """Size of its own data files together."""
        return sum(file.nbytes for file in self.files if not file.name.startswith(BESIDE))

    @property
    def shared_nbytes(self) -> int:
        """Size of the encoded shards in files that it shares with others."""
        return sum(totals.encoded_nbytes for totals in self.shared.values())

    @property
    def ratio(self) -> float:
        """Uncompressed size over that of its data files and what it shares; 1.0 if there is nothing."""
        uncompressed_nbytes, nbytes = self.totals.uncompressed_nbytes, self.file_nbytes + self.shared_nbytes
        return uncompressed_nbytes / nbytes if uncompressed_nbytes and nbytes else 1.0

    def by_prefix(self, depth: int) -> dict[str, Totals]:
        """Return sums over the items whose keys have the same first `depth` parts."""
        return _sums((".".join(item.fqn.split(".")[:depth]), item.totals) for item in self.items)

    def only(self, items: Sequence[Item]) -> Inspection:
        """Return the same of some of the items; data files stay as they are, and sums by codec are of whole items."""
        by_dtype = _sums((item.dtype, item.totals) for item in items)
        by_codec = _sums((", ".join(item.codecs), item.totals) for item in items)
        return replace(self, items=tuple(items), by_dtype=by_dtype, by_codec=by_codec)

    @property
    def headline(self) -> str:
        """What it is, and its sizes, in a line."""
        own = sum(not file.name.startswith(BESIDE) for file in self.files)
        shares = ""
        if self.shared:
            shares = f" and {decimal(self.shared_nbytes)} that it shares with {', '.join(self.shared)}"
        return (
            f"{self.path} is {_WHOSE[self.layout]}: {decimal(self.totals.uncompressed_nbytes)} in "
            f"{counted(own, 'data file')} of {decimal(self.file_nbytes)}{shares}, ratio {self.ratio:.3f}"
        )

    def shown(self) -> Iterator[str | Table]:
        """Return what it prints: the headline, the keys, and sums by dtype and codec."""
        yield self.headline
        yield self.table_of(self.items)
        yield from self.sums_shown()

    def sums_shown(self) -> Iterator[str | Table]:
        """Return the tables of sums by dtype and codec."""
        for title, by in (("dtype", self.by_dtype), ("codec", self.by_codec)):
            if by:
                yield ""
                yield table_of_totals(title, by)

    def table_of(self, items: Iterable[Item]) -> Table:
        """Return a table of some of the items, in their order, with the sums of all."""
        columns = [
            left("key"), left("dtype", 4), left("shape", 2), Column("shards", 6), left("codec", 5), Column("before", 3),
            Column("after", 1), Column("ratio", 1),
        ]  # fmt: skip
        rows = [
            (
                item.fqn,
                f"{item.dtype} (torch.save)" if item.kind == "torch_save" else item.dtype,
                "" if item.shape is None else str(list(item.shape)),
                str(item.totals.records),
                ", ".join(item.codecs) + (" (packed)" if item.packed else ""),
                *item.totals.cells(),
            )
            for item in items
        ]
        totals = self.totals
        rows.append(("total", counted(len(self.items), "key"), "", str(totals.records), "", *totals.cells()))
        return Table(columns, rows)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values. Keys are only ever added to this document; `schema` changes if one must go."""
        return {
            "schema": 1,
            "checkpoint": self.path,
            "layout": self.layout,
            "save_id": self.save_id,
            "totals": {
                "items": len(self.items),
                **_totals_json(self.totals),
                "file_nbytes": self.file_nbytes,
                "shared_nbytes": self.shared_nbytes,
                "ratio": self.ratio,
            },
            "by_dtype": {name: _totals_json(totals) for name, totals in self.by_dtype.items()},
            "by_codec": {name: _totals_json(totals) for name, totals in self.by_codec.items()},
            "shared": {name: _totals_json(totals) for name, totals in self.shared.items()},
            "items": [_item_json(item) for item in self.items],
            "files": as_json(self.files),
        }


def _item_json(item: Item) -> dict[str, Any]:
    values = as_json(item)
    del values["totals"]
    return {**values, **_totals_json(item.totals)}


def _sums(named: Iterable[tuple[str, Totals]]) -> dict[str, Totals]:
    found: dict[str, Totals] = {}
    for name, totals in named:
        found[name] = found.get(name, Totals()) + totals
    return found


def _totals_json(totals: Totals) -> dict[str, Any]:
    return {
        "shards": totals.records,
        "uncompressed_nbytes": totals.uncompressed_nbytes,
        "encoded_nbytes": totals.encoded_nbytes,
        "ratio": totals.ratio,
    }


def inspect(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Inspection:
    """Return the contents of a checkpoint. Reads its metadata and footers only.

    Args:
        path: a local path or any fsspec URL: of a checkpoint, or of a file that `load_compressed_checkpoint` reads.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Returns:
        Its keys with their dtypes, shapes, codecs and sizes, its data files, and sums.

    Raises:
        ConfigurationError: an option is unknown.
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointError: it can't be read, or contradicts itself.
    """
    try:
        metadata = NvcompReader(path, **checked_storage_options(storage_options)).read_metadata()
    except CheckpointNotFoundError:
        with opened(path, storage_options) as filesystem, lone_file(filesystem) as alone:
            if alone is None:
                raise
            _, metadata = alone.read_metadata()
            return replace(_inspect(alone.filesystem, metadata), path=filesystem.path, layout=LAYOUT_FILE)
    with opened(path, storage_options) as filesystem:
        return _inspect(filesystem, metadata)


@dataclass(frozen=True)
class _Stored:
    fqn: str
    kind: str
    codec: str
    packed: bool
    totals: Totals


def _inspect(filesystem: Filesystem, metadata: Metadata) -> Inspection:
    if metadata.storage_data is None:
        raise MetadataError("`.metadata` does not say where anything is stored.", path=filesystem.path)
    ours: dict[DataFileRef, list[tuple[MetadataIndex, int]]] = {}
    stock: dict[str, list[tuple[MetadataIndex, StockItem]]] = {}
    for index, value in metadata.storage_data.items():
        if isinstance(value, StoredAt):
            ours.setdefault(value.file, []).append((index, value.record))
        else:
            stock.setdefault(value.relative_path, []).append((index, value))
    files = [DataFile(file.name, file.nbytes, file.footer_nbytes) for file in ours]
    files += filesystem.map(lambda name: _stock_file(filesystem, name), stock)
    stored: list[_Stored] = []
    shared: dict[str, Totals] = {}
    for file, footer, entries in zip(ours, read_footers(filesystem, ours), ours.values(), strict=True):
        of_file = list(_records(footer, entries))
        stored += of_file
        for directory in shared_directories([file.name]):
            shared[directory] = sum((one.totals for one in of_file), shared.get(directory, Totals()))
    stored += _stock_shards(metadata, [entry for entries in stock.values() for entry in entries])
    by_dtype = _sums((_dtype(metadata, one.fqn), one.totals) for one in stored)
    by_codec = _sums((one.codec, one.totals) for one in stored)
    return Inspection(
        filesystem.path,
        LAYOUT_STOCK if stock else LAYOUT_OURS,
        metadata.storage_meta.save_id if metadata.storage_meta is not None else None,
        _items(metadata, stored),
        tuple(sorted(files, key=lambda file: natural_order(file.name))),
        dict(sorted(by_dtype.items())),
        dict(sorted(by_codec.items())),
        dict(sorted(shared.items())),
    )


def _items(metadata: Metadata, stored: Sequence[_Stored]) -> tuple[Item, ...]:
    """Gather shards by key; keys without any shard are included."""
    by_fqn: dict[str, list[_Stored]] = {fqn: [] for fqn in metadata.state_dict_metadata}
    for one in stored:
        by_fqn.setdefault(one.fqn, []).append(one)
    items = []
    for fqn in sorted(by_fqn, key=natural_order):
        shards, described = by_fqn[fqn], metadata.state_dict_metadata.get(fqn)
        is_tensor = isinstance(described, TensorStorageMetadata)
        items.append(
            Item(
                fqn,
                shards[0].kind if shards else KIND_TENSOR if is_tensor else KIND_BYTES,
                _dtype(metadata, fqn),
                tuple(described.size) if isinstance(described, TensorStorageMetadata) else None,
                tuple(sorted({shard.codec for shard in shards})),
                any(shard.packed for shard in shards),
                sum((shard.totals for shard in shards), Totals()),
            )
        )
    return tuple(items)


def _records(footer: Footer, entries: Sequence[tuple[MetadataIndex, int]]) -> Iterator[_Stored]:
    """Yield what a footer holds of the shards that `.metadata` places in its file."""
    for index, number in entries:
        record = footer.records[number] if 0 <= number < len(footer.records) else None
        if record is None or record.fqn != index.fqn:
            raise FileMismatchError(
                f"The footer disagrees with `.metadata`, which says that record {number} is this key.",
                path=footer.path,
                fqn=index.fqn,
            )
        holder = record if record.pack is None else footer.records[record.pack[0]]
        assert holder.chain is not None
        totals = Totals(1, record.uncompressed_nbytes, _encoded_nbytes(footer, record, holder))
        yield _Stored(index.fqn, record.kind, holder.chain.label, record.pack is not None, totals)


def _encoded_nbytes(footer: Footer, record: Record, holder: Record) -> int:
    """Return the record's bytes in the file; in a pack, its share of them."""
    encoded_nbytes = footer.record_encoded_nbytes(holder)
    if record.pack is None or not holder.elements:
        return encoded_nbytes
    start = record.pack[1]
    stop = start + record.elements
    return encoded_nbytes * stop // holder.elements - encoded_nbytes * start // holder.elements


def _stock_file(filesystem: Filesystem, name: str) -> DataFile:
    nbytes = filesystem.file_nbytes(name)
    if nbytes is None:
        raise StorageError("A data file is missing.", path=filesystem.location(name), errno=errno.ENOENT)
    return DataFile(name, nbytes, 0)


def _stock_shards(metadata: Metadata, entries: Sequence[tuple[MetadataIndex, StockItem]]) -> Iterator[_Stored]:
    shards = ShardIndex(metadata.state_dict_metadata)
    for index, item in entries:
        # torch calls them "stream.zstd/1"
        names = [re.sub(r"^stream\.|/.*$", "", descriptor) for descriptor in item.transform_descriptors]
        codec = "-".join([LAYOUT_STOCK, *names])
        if not shards.is_tensor(index.fqn):
            yield _Stored(index.fqn, KIND_BYTES, codec, False, Totals(1, item.length, item.length))
            continue
        shard = shards.find(index)
        nbytes = 0 if shard is None else shard.nbytes
        yield _Stored(index.fqn, KIND_TENSOR, codec, False, Totals(1, nbytes, item.length))


def _dtype(metadata: Metadata, fqn: str) -> str:
    described = metadata.state_dict_metadata.get(fqn)
    if isinstance(described, TensorStorageMetadata):
        return dtype_name(described.properties.dtype)
    return KIND_BYTES
