"""Reads part of a tensor that `torch.save` wrote: its archive's directory and description, then only the rows.

    end of the archive  ->  where the files in it are
    data.pkl            ->  dtype, shape, strides and offset of the tensor in its storage; nothing in it is run
    data/<key>          ->  the bytes from the first to the last element of the region

CRCs are of whole files, so what is read so is not checked by one. Whatever is not a plain, contiguous tensor of the
expected kind is left to a read of the whole item.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.format.blocks import Box
from dcp_nvcomp.format.metadata.stored import StockItem
from dcp_nvcomp.storage.base import Filesystem

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


def read_part(
    filesystem: Filesystem, item: StockItem, *, sizes: tuple[int, ...], dtype: torch.dtype, region: Box
) -> torch.Tensor | None:
    """Read a region of a stored tensor."""
    first, last = _span(sizes, region)
    if item.transform_descriptors or math.prod(sizes) * dtype.itemsize < _WORTHWHILE_NBYTES:
        return None
    if (last - first) * dtype.itemsize > item.length - _WORTHWHILE_NBYTES:
        return None
    try:
        start = _Archive(filesystem, item).start_of_elements(sizes, dtype)
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
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    strides = _strides(sizes)
    return flat.as_strided(region.sizes, strides)


def _strides(sizes: tuple[int, ...]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _span(sizes: tuple[int, ...], region: Box) -> tuple[int, int]:
    """Return the places of the first element of a region, and after its last one."""
    strides = _strides(sizes)
    first = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    last = sum((size - 1) * stride for size, stride in zip(region.sizes, strides, strict=True))
    return first, first + last + 1


@dataclass(frozen=True)
class _Storage:
    """A storage as a description names it."""

    kind: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    """A tensor as a description names it."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Archive:
    """An archive of `torch.save` inside a data file."""

    def __init__(self, filesystem: Filesystem, item: StockItem) -> None:
        self._file = _ItemFile(filesystem, item)
        self._zip = zipfile.ZipFile(self._file)

    def start_of_elements(self, sizes: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return where in the item the tensor's first element is; None if it is not such a tensor."""
        (described,) = (info for info in self._zip.infolist() if info.filename.endswith("/data.pkl"))
        folder = described.filename.removesuffix("data.pkl")
        order = self._zip.getinfo(f"{folder}byteorder")
        if not all(_is_small_and_stored(info) for info in (described, order)):
            return None
        tensor = _Description(io.BytesIO(self._zip.read(described))).load()
        if not isinstance(tensor, _Tensor) or self._zip.read(order) != b"little":
            return None
        if tensor.size != sizes or tensor.stride != tuple(_strides(sizes)) or _DTYPES.get(tensor.storage.kind) != dtype:
            return None
        data = self._zip.getinfo(f"{folder}data/{tensor.storage.key}")
        if data.compress_type != zipfile.ZIP_STORED:
            return None
        if not 0 <= tensor.offset * dtype.itemsize <= data.file_size - math.prod(sizes) * dtype.itemsize:
            return None
        self._file.seek(data.header_offset)
        header = self._file.read(_LOCAL_HEADER_NBYTES)
        names_nbytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return data.header_offset + _LOCAL_HEADER_NBYTES + names_nbytes + tensor.offset * dtype.itemsize


def _is_small_and_stored(info: zipfile.ZipInfo) -> bool:
    return info.compress_type == zipfile.ZIP_STORED and info.file_size <= _MAX_PICKLE_NBYTES


class _Description(pickle.Unpickler):
    """Reads the description of one tensor. All that it may name are two functions of ours, which only take notes."""

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


def _rebuilt(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *more: Any) -> _Tensor:
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
