"""What one execution of each target does. They call what the package calls on a load, and know no more than it does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.codecs.coders import Ans
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.data_file import DataFileRef, block_row, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.framing import TRAILER_NBYTES, check_header, decode_trailer
from dcp_nvcomp.format.metadata.rank_metadata import merge_rank_metadata, prefer_rank
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.metadata.shards import StockItem
from dcp_nvcomp.loading.bases import base_of
from dcp_nvcomp.loading.items import read_stock_bytes, read_stock_tensor
from dcp_nvcomp.loading.safe_objects import SafeLoader

from .parts import FileParts, Tail

_PATH = "run/__0_0_0.distcp"
# What a load would have asked for: decoding more than that takes time, which is nobody's fault.
_DECODED_NBYTES = 32 << 20
_VERIFY = ("off", "stored", "full")


class _OneFile:
    """As much of a filesystem as reading one file takes."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail

    def location(self, name: str) -> str:
        return f"run/{name}"

    def file_nbytes(self, name: str) -> int:
        return self._tail.file_nbytes

    def read(self, name: str, start: int, stop: int) -> bytes:
        assert self._tail.offset <= start <= stop, "nothing but the footer is read"
        return self._tail.data[start - self._tail.offset : stop - self._tail.offset]


def metadata(data: bytes) -> None:
    """`.metadata`, read and looked at."""
    parsed = parse_metadata(data, path="run/.metadata")
    for item in parsed.state_dict_metadata.values():
        assert isinstance(item, TensorStorageMetadata | BytesStorageMetadata)
    for index in parsed.storage_data:
        assert type(index) is MetadataIndex and parsed.storage_data[index] is not None


def rank(data: bytes) -> None:
    """Up to four ranks' metadata of one tensor and one object, made of the input's bytes."""
    digits = iter(data)

    def digit(limit: int) -> int:
        return next(digits, 0) % limit

    dims, ranks = digit(4), 1 + digit(4)
    size = torch.Size([digit(9) for _ in range(dims)])
    parts: dict[int, Metadata] = {}
    for number in range(ranks):
        mine = torch.Size([digit(9) for _ in range(dims)]) if digit(32) == 31 else size
        offsets = {torch.Size([digit(9) for _ in range(dims)]) for _ in range(digit(5))}
        # parse_metadata refuses shards that reach out of their tensor
        offsets = {offset for offset in offsets if all(a <= limit for a, limit in zip(offset, mine, strict=True))}
        rooms = [[limit - a for a, limit in zip(offset, mine, strict=True)] for offset in offsets]
        sizes = [torch.Size([digit(room + 1) for room in one]) for one in rooms]
        shards = [ChunkStorageMetadata(*box) for box in zip(offsets, sizes, strict=True)]
        items: dict[str, Any] = {"w": TensorStorageMetadata(TensorProperties(), mine, shards)} if shards else {}
        items.update({"o": BytesStorageMetadata()} if digit(2) else {})
        stored: dict[MetadataIndex, Any] = {MetadataIndex("w", offset): number for offset in offsets}
        stored.update({MetadataIndex("o"): number} if digit(8) else {})
        parts[number + (digit(16) == 15)] = Metadata(items, planner_data={"w": ("w",)}, storage_data=stored)
    merged = merge_rank_metadata(parts, path="run")
    for part in parts.values():
        prefer_rank(merged, part)
    whole = merged.state_dict_metadata.get("w")
    if isinstance(whole, TensorStorageMetadata) and 0 not in whole.size:
        _check_tiling(whole)


def _check_tiling(whole: TensorStorageMetadata) -> None:
    covered = np.zeros(tuple(whole.size), np.int8)
    for shard in whole.chunks:
        covered[Box(tuple(shard.offsets), tuple(shard.sizes)).index] += 1
    assert (covered == 1).all(), "the merged shards are not the tensor"


def footer(data: bytes) -> None:
    """A footer as `read_footer` reads it, and every record as a load looks at it."""
    _look_at(_footer_of(FileParts.split(data).tail()))


def _footer_of(tail: Tail) -> Footer:
    """The footer of a file that `.metadata` names as it is."""
    trailer = decode_trailer(tail.data[-TRAILER_NBYTES:], path=_PATH, file_nbytes=tail.file_nbytes)
    file = DataFileRef(_PATH, tail.file_nbytes, trailer.footer_nbytes, trailer.footer_crc)
    return read_footer(_OneFile(tail), file)  # type: ignore[arg-type]


def _look_at(found: Footer) -> None:
    assert len(found.block_offsets) == len(found.tables.flags) + 1 == len(found.slice_starts)
    assert (np.diff(found.block_offsets) >= 0).all() and (np.diff(found.slice_starts) >= 0).all()
    for record in found.records[:50]:
        assert record.uncompressed_nbytes >= 0 and found.record_encoded_nbytes(record) >= 0
        holder = record if record.pack is None else found.records[record.pack[0]]
        assert holder.grid is not None and holder.chain is not None
        region = Box((0,) * len(holder.shape), holder.shape)
        if record.pack is not None:
            region = Box((record.pack[1],), (record.elements,))
        for _, index in zip(range(20), holder.grid.overlapping(region), strict=False):
            number = holder.first_block + index
            box = holder.grid.box(index)
            assert box.elements * holder.element.nbytes == found.block_nbytes[number]
            block_row(found, number)


def decode(data: bytes) -> None:
    """A whole data file, every block decoded; the first byte says how much is verified."""
    file = FileParts.split(data).file()
    # a file is as it is on disk, so whatever the trailer says comes from these bytes
    found = _footer_of(Tail(0, file))
    check_header(file[: int(found.block_offsets[0])], path=_PATH)
    engine, left, verify = CpuEngine(), _DECODED_NBYTES, _VERIFY[(data[0] >> 3) % 3]
    for record in found.records:
        if record.chain is None or isinstance(record.chain.coder, Ans):
            continue
        for number in range(record.first_block, record.first_block + record.block_count):
            nbytes = int(found.block_nbytes[number])
            left -= nbytes
            if left < 0:
                return
            encoded = memoryview(file)[found.block_offsets[number] : found.block_offsets[number + 1]]
            out = np.empty(nbytes, np.uint8)
            needed, base = base_of(found, record, number), None
            if needed is not None:
                base = np.frombuffer(file[: int(found.block_nbytes[needed.number])].ljust(nbytes // 2, b"\0"), np.uint8)
            engine.decode(encoded, block_row(found, number), record.chain, out, verify=verify, base=base)


def stock(data: bytes) -> None:
    """An item of a stock checkpoint: zstd or plain, an object or a tensor of sixteen elements."""
    head, content = data[:1] or b"\0", data[1:]
    item = StockItem("__0_0.distcp", 0, len(content), ("stream.zstd/1.0",) if head[0] & 1 else ())
    filesystem: Any = _OneFile(Tail(0, content))
    if head[0] & 2:
        loaded = read_stock_tensor(filesystem, item, sizes=(16,))
        assert math.prod(loaded.shape) == 16
    else:
        stream = read_stock_bytes(filesystem, item)
        if head[0] & 4:
            SafeLoader((), check_objects=True).checked(stream, "o")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "metadata": metadata,
    "rank": rank,
    "footer": footer,
    "decode": decode,
    "stock": stock,
}
