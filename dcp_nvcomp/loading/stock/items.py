"""Reads single items of checkpoints that stock DCP's FileSystemWriter or FsspecWriter wrote.

Each item is what `torch.save` wrote (a tensor), or the planner's bytes, at an offset of a file; perhaps sent through
"stream transforms" first, of which torch has one: zstd.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import zstandard

from dcp_nvcomp.errors import CheckpointError, CorruptDataError, TruncatedFileError, UnknownCodecError
from dcp_nvcomp.format.metadata.stored import StockItem
from dcp_nvcomp.loading.safe_objects import check_crcs, load_tensor_safely
from dcp_nvcomp.storage.base import Filesystem

# The most an item may decode to if its true size is not recorded: pickles grow a few times, zstd 32768 times.
MAX_STOCK_NBYTES: Final = 64 << 30
_SMALL_NBYTES: Final = 16 << 20
_GROWTH: Final = 1024
# What torch.save adds to the elements: some KB; a subclass may add more.
_TORCH_SAVE_NBYTES: Final = 1 << 20
_MAX_ITEMSIZE: Final = 16  # of complex128
# So that this much of a zstd frame makes at most 8 MiB before the limit is looked at.
_STEP_NBYTES: Final = 256
_LARGE_STEP_NBYTES: Final = 1 << 16
# RFC 8878 wants no more of a decoder, and torch writes less.
_WINDOW_NBYTES: Final = 8 << 20


def read_stock_bytes(filesystem: Filesystem, item: StockItem, *, limit_nbytes: int | None = None) -> io.BytesIO:
    """Read a bytes item as DCP's planner gave it to the stock writer."""
    if limit_nbytes is None:
        limit_nbytes = _likely_nbytes(item)
    try:
        stream = _read(filesystem, item, limit_nbytes)
        check_crcs(stream)
    except CheckpointError as error:
        raise _located(error, filesystem, item) from error.__cause__
    return stream


def read_stock_tensor(
    filesystem: Filesystem,
    item: StockItem,
    *,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    trusted: Sequence[Any] = (),
) -> torch.Tensor:
    """Read a shard that `torch.save` wrote, on the CPU, with `weights_only=True`, so nothing in it is executed."""
    limit_nbytes = _likely_nbytes(item)
    if sizes is not None:
        limit_nbytes = most_nbytes(sizes, dtype)
    try:
        tensor = load_tensor_safely(_read(filesystem, item, limit_nbytes), trusted, crcs=True)
        if (sizes is not None and tensor.shape != torch.Size(sizes)) or (dtype is not None and tensor.dtype != dtype):
            raise CorruptDataError(
                f"The item holds {tensor.dtype} of {tuple(tensor.shape)}, not what `.metadata` says."
            )
    except CheckpointError as error:
        raise _located(error, filesystem, item) from error.__cause__
    return tensor


def most_nbytes(sizes: Sequence[int], dtype: torch.dtype | None = None) -> int:
    """Return the most bytes that `torch.save` writes for a tensor of this shape, of any dtype if none is given."""
    return math.prod(sizes) * (_MAX_ITEMSIZE if dtype is None else dtype.itemsize) + _TORCH_SAVE_NBYTES


def _read(filesystem: Filesystem, item: StockItem, limit_nbytes: int) -> io.BytesIO:
    data = filesystem.read(item.relative_path, item.offset, item.offset + item.length)
    for descriptor in item.transform_descriptors:
        data = _undo(descriptor, data, limit_nbytes)
    return io.BytesIO(data)


def _likely_nbytes(item: StockItem) -> int:
    return max(_SMALL_NBYTES, _GROWTH * item.length)


def _located(error: CheckpointError, filesystem: Filesystem, item: StockItem) -> CheckpointError:
    error.path = error.path or filesystem.location(item.relative_path)
    error.byte_range = error.byte_range or (item.offset, item.offset + item.length)
    return error


def _undo(descriptor: str, data: bytes, limit_nbytes: int) -> bytes:
    """Undo one stream transform, given as torch's extensions describe themselves: "name[@domain][/version]"."""
    name, _, version = descriptor.partition("/")
    if name != "stream.zstd" or version.partition(".")[0] not in ("1", ""):
        raise UnknownCodecError(
            f"The item went through the stream transform {descriptor[:100]!r}, which this reader does not know. "
            "Load it with stock DCP's FileSystemReader and the extension that wrote it."
        )
    output = io.BytesIO()
    try:
        _unzstd(memoryview(data), output, limit_nbytes)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"The item is not a valid zstd stream: {error}.") from error
    return output.getvalue()


def _unzstd(data: memoryview, output: io.BytesIO, limit_nbytes: int) -> None:
    """Decode zstd frames one after the other: the pyzstd that torch may use ends one at each flush."""
    while True:
        frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_NBYTES).decompressobj()
        while not frame.eof:
            if not data:
                raise TruncatedFileError("The item ends inside a zstd frame.")
            # a step of input may inflate 2^15-fold: no further than what is left, and by large steps far from the limit
            step_nbytes = min(max((limit_nbytes - output.tell()) >> 15, _STEP_NBYTES), _LARGE_STEP_NBYTES)
            output.write(frame.decompress(data[:step_nbytes]))
            data = data[min(len(data), step_nbytes) - len(frame.unused_data) :]
            if output.tell() > limit_nbytes:
                raise CorruptDataError(f"The item decodes to more than {limit_nbytes} bytes, the most it can be.")
        if not data:
            return
