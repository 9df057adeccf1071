"""Load some items: those of this package in one job, those of stock DCP one after the other.

An item of stock DCP's writers is what `torch.save` wrote (a tensor), or the planner's bytes, at an offset of a file;
perhaps sent through "stream transforms" first. Of a tensor that is needed in part, only the rows are read, if it is a
plain, contiguous one; CRCs are of whole files, so what is read so is not checked by one.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import zstandard
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_nvcomp.errors import (
    CheckpointError,
    CorruptDataError,
    MetadataError,
    ShapeMismatchError,
    StorageError,
    TruncatedFileError,
    UnknownCodecError,
)
from dcp_nvcomp.format.block_grid import Box, element_span, strides_of
from dcp_nvcomp.format.data_file import DataFileRef, read_footers
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import StockItem, StoredAt
from dcp_nvcomp.loading.job import ItemPlanner, Loaded, LoadJob, LoadOptions
from dcp_nvcomp.loading.read_plan import Conversions, Wanted, part_of
from dcp_nvcomp.loading.safe_objects import SafeLoader, check_crcs, load_tensor_safely
from dcp_nvcomp.loading.sharing.replicas import Replicas
from dcp_nvcomp.storage.base import Filesystem

Footers = Callable[[Filesystem, Sequence[DataFileRef]], Sequence[Footer]]

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
_ENDS_NBYTES: Final = 4 << 10  # at the end the directory, at the beginning the description: 1 KB each
_MAX_PICKLE_NBYTES: Final = 64 << 10
_LOCAL_HEADER_NBYTES: Final = 30
_WORTHWHILE_NBYTES: Final = 64 << 10
# The classes by which torch.save names element types; it stores tensors of newer types in other ways.
_DTYPES: Final = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


def load_items(
    filesystem: Filesystem,
    items: Sequence[Wanted],
    planner: ItemPlanner,
    options: LoadOptions,
    *,
    footers: Footers = read_footers,
    progress: Callable[[int], None] | None = None,
    replicas: Replicas | None = None,
) -> Loaded:
    conversions = Conversions()  # of this load: each load warns
    ours = [item for item in items if isinstance(item.stored, StoredAt)]
    stock = [item for item in items if not isinstance(item.stored, StoredAt)]
    job = LoadJob(
        filesystem,
        planner,
        options,
        conversions=conversions,
        footers=footers,
        progress=progress,
        replicas=replicas,
    )
    loaded = job.run(ours)
    load_stock_items(filesystem, stock, planner, options.safe, conversions)
    return loaded


def load_stock_items(
    filesystem: Filesystem, items: Sequence[Wanted], planner: ItemPlanner, safe: SafeLoader, conversions: Conversions
) -> None:
    for wanted in sorted(items, key=lambda wanted: _position(wanted.stored)):
        item, fqn = wanted.item, wanted.item.storage_index.fqn
        try:
            if item.type == LoadItemType.BYTE_IO:
                # what is not checked could run code, and so may as well have any size
                limit_nbytes = None if safe.checks_objects else MAX_STOCK_NBYTES
                data = read_stock_bytes(filesystem, wanted.stored, limit_nbytes=limit_nbytes)
                planner.load_bytes(item, safe.checked(data, fqn))
            else:
                _load_tensor(filesystem, wanted, planner, safe, conversions)
        except CheckpointError as error:
            error.fqn = error.fqn or fqn
            raise


def _position(where: StockItem) -> tuple[str, int]:
    return where.relative_path, where.offset


def _load_tensor(
    filesystem: Filesystem, wanted: Wanted, planner: ItemPlanner, safe: SafeLoader, conversions: Conversions
) -> None:
    item, shard = wanted.item, wanted.shard
    if shard is None:
        raise MetadataError("`.metadata` says that this is a Python object, but a tensor was requested.")
    region = Box(tuple(item.storage_offsets), tuple(item.lengths))
    whole = Box((0,) * len(shard.sizes), shard.sizes)
    part = None
    if whole.contains(region) and region != whole and region.elements:
        part = read_part(filesystem, wanted.stored, sizes=shard.sizes, dtype=shard.dtype, region=region)
    if part is None:
        # not checked against the dtype of `.metadata`: planners may convert what they save
        saved = read_stock_tensor(filesystem, wanted.stored, sizes=shard.sizes, trusted=safe.trusted)
        part = part_of(saved, region)
        if part is None:
            raise ShapeMismatchError(
                f"The stored tensor has shape {tuple(saved.shape)}, which does not contain {region}."
            )
    destination = planner.resolve_tensor(item).detach()
    if destination.shape != part.shape:
        raise ShapeMismatchError(f"The destination has shape {tuple(destination.shape)}, not {tuple(part.shape)}.")
    conversions.check(item.dest_index.fqn, part.dtype, destination.dtype)
    destination.copy_(part)
    planner.commit_tensor(item, destination)


def read_stock_bytes(filesystem: Filesystem, item: StockItem, *, limit_nbytes: int | None = None) -> io.BytesIO:
    """Read a bytes item as DCP's planner gave it to the stock writer."""
    try:
        stream = _read(filesystem, item, _likely_nbytes(item) if limit_nbytes is None else limit_nbytes)
        check_crcs(stream)
    except CheckpointError as error:
        raise _located(error, filesystem, item) from error.__cause__
    return stream


def read_stock_tensor(
    filesystem: Filesystem, item: StockItem, *, sizes: Sequence[int] | None = None, trusted: Sequence[Any] = ()
) -> torch.Tensor:
    """Read a shard that `torch.save` wrote, on the CPU, with `weights_only=True`, so nothing in it is executed."""
    limit_nbytes = _likely_nbytes(item) if sizes is None else most_nbytes(sizes)
    try:
        tensor = load_tensor_safely(_read(filesystem, item, limit_nbytes), trusted, crcs=True)
        if sizes is not None and tensor.shape != torch.Size(sizes):
            raise CorruptDataError(
                f"The item holds {tensor.dtype} of {tuple(tensor.shape)}, not what `.metadata` says."
            )
    except CheckpointError as error:
        raise _located(error, filesystem, item) from error.__cause__
    return tensor


def most_nbytes(sizes: Sequence[int]) -> int:
    """Return the most bytes that `torch.save` writes for a tensor of this shape, of any dtype."""
    return math.prod(sizes) * _MAX_ITEMSIZE + _TORCH_SAVE_NBYTES


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


def read_part(
    filesystem: Filesystem, item: StockItem, *, sizes: tuple[int, ...], dtype: torch.dtype, region: Box
) -> torch.Tensor | None:
    first, last = element_span(sizes, region)
    if item.transform_descriptors or math.prod(sizes) * dtype.itemsize < _WORTHWHILE_NBYTES:
        return None
    if (last - first) * dtype.itemsize > item.length - _WORTHWHILE_NBYTES:
        return None
    try:
        start = _start_of_elements(_ItemFile(filesystem, item), sizes, dtype)
    except StorageError:
        raise
    except Exception:  # zipfile and pickle raise almost anything; the whole item says what is wrong
        return None
    if start is None:
        return None
    begin, end = start + first * dtype.itemsize, start + last * dtype.itemsize
    if end > item.length:
        return None
    data = bytearray(end - begin)
    filesystem.read_into(item.relative_path, item.offset + begin, memoryview(data))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).as_strided(region.sizes, strides_of(sizes))


class _Storage(NamedTuple):
    kind: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _start_of_elements(file: _ItemFile, sizes: tuple[int, ...], dtype: torch.dtype) -> int | None:
    archive = zipfile.ZipFile(file)
    (described,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
    folder = described.filename.removesuffix("data.pkl")
    order = archive.getinfo(f"{folder}byteorder")
    for info in (described, order):
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > _MAX_PICKLE_NBYTES:
            return None
    tensor = _Description(io.BytesIO(archive.read(described))).load()
    if not isinstance(tensor, _Tensor) or archive.read(order) != b"little":
        return None
    if tensor.size != sizes or tensor.stride != tuple(strides_of(sizes)) or _DTYPES.get(tensor.storage.kind) != dtype:
        return None
    data = archive.getinfo(f"{folder}data/{tensor.storage.key}")
    if data.compress_type != zipfile.ZIP_STORED:
        return None
    if not 0 <= tensor.offset * dtype.itemsize <= data.file_size - math.prod(sizes) * dtype.itemsize:
        return None
    file.seek(data.header_offset)
    header = file.read(_LOCAL_HEADER_NBYTES)
    names_nbytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return data.header_offset + _LOCAL_HEADER_NBYTES + names_nbytes + tensor.offset * dtype.itemsize


class _Description(pickle.Unpickler):
    """Reads the description of one tensor. It may name two functions only, which call nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, *_ = pid
        if type(kind) is not str or type(key) is not str:
            raise pickle.UnpicklingError("storage")
        return _Storage(kind, key)


def _rebuilt(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], _grad: Any, _hooks: Any, *more: Any
) -> _Tensor:
    if any(more):  # conjugate and negative bits, over elements of other values
        raise pickle.UnpicklingError("metadata")
    return _Tensor(storage, int(offset), tuple(size), tuple(stride))


class _ItemFile(io.RawIOBase):
    """An item as a file, whose ends are read once."""

    def __init__(self, filesystem: Filesystem, item: StockItem) -> None:
        self._filesystem, self._item, self._at = filesystem, item, 0
        self._tail_start = max(item.length - _ENDS_NBYTES, 0)
        self._tail = self._fetched(self._tail_start, item.length)
        self._head = self._fetched(0, min(_ENDS_NBYTES, item.length))

    def _fetched(self, start: int, stop: int) -> bytes:
        return self._filesystem.read(self._item.relative_path, self._item.offset + start, self._item.offset + stop)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._item.length}[whence]
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        stop = self._item.length if nbytes < 0 else min(self._at + nbytes, self._item.length)
        start, self._at = self._at, max(stop, self._at)
        if start >= stop:
            return b""
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        return self._head[start:stop] if stop <= len(self._head) else self._fetched(start, stop)
