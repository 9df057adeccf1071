"""Read a stream at any place, and plain files in the same way."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_nvcomp.engines.tensors import torch_dtype
from dcp_nvcomp.errors import FormatError
from dcp_nvcomp.format.data_file import DataFileRef, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.shards import Shard, StoredAt
from dcp_nvcomp.format.names import STREAM_KEY
from dcp_nvcomp.format.record import KIND_BYTES
from dcp_nvcomp.loading.items import load_items
from dcp_nvcomp.loading.job import LoadOptions
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.safe_objects import SafeLoader
from dcp_nvcomp.reading.stored_tensor import Destinations, items_of_object
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.streams.pieces import LENGTH_NBYTES, LITERALS, Piece, boxes_of_run, parse_pieces
from dcp_nvcomp.streams.writer import tensor_of


class RangeReader(io.RawIOBase, ABC):
    """A file that is read at any place. Not for several threads at once."""

    def __init__(self, filesystem: Filesystem) -> None:
        super().__init__()
        self._filesystem, self._position, self.nbytes = filesystem, 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; beyond the end nothing is read."""
        position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence] + offset
        if position < 0:
            raise ValueError(f"negative seek position {position}")
        self._position = position
        return position

    def readall(self) -> bytes:
        """Return all that follows."""
        out = bytearray(max(self.nbytes - self._position, 0))
        self.readinto(out)
        return bytes(out)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, less if the file ends before.

        Raises:
            CheckpointError: the bytes can't be read, or are damaged; what the buffer holds then is undefined.
        """
        start = self._position
        with memoryview(buffer).cast("B") as view:
            stop = min(start + len(view), self.nbytes)
            if stop > start:
                # not a view of the buffer, which mmap.close, that callers do after an error, would find in its frames
                self._read(start, stop, tensor_of(view))
        self._position = max(start, stop)
        return self._position - start

    @abstractmethod
    def _read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Read the bytes from `start` to `stop` into the beginning of `out`."""

    def close(self) -> None:
        if not self.closed:
            self._filesystem.close()
        super().close()


class PlainReader(RangeReader):
    """A file as it is."""

    def __init__(self, filesystem: Filesystem, name: str, nbytes: int) -> None:
        super().__init__(filesystem)
        self._name, self.nbytes = name, nbytes

    def _read(self, start: int, stop: int, out: torch.Tensor) -> None:
        data = memoryview(self._filesystem.read(self._name, start, stop))  # which the tensor does not keep
        out[: stop - start] = tensor_of(data)


@dataclass(frozen=True)
class StreamIndex:
    """What a file of `StreamWriter` says of its stream: enough to read any range of it."""

    file: DataFileRef
    footer: Footer
    nbytes: int  # of the stream
    pieces: Sequence[Piece]
    records: Sequence[int]  # numbers in the footer, by those that pieces have
    literals: memoryview

    @classmethod
    def read(cls, filesystem: Filesystem, file: DataFileRef, options: LoadOptions) -> StreamIndex:
        """Read it.

        Args:
            filesystem: the directory that the file is in.
            file: as `.metadata` would name it.
            options: of the load.

        Raises:
            CheckpointError: it is another file, or damaged.
        """
        footer = read_footer(filesystem, file)
        numbers = {record.fqn: number for number, record in enumerate(footer.records)}
        if STREAM_KEY not in numbers or footer.records[numbers[STREAM_KEY]].kind != KIND_BYTES:
            raise FormatError("This file has no stream.", path=footer.path)
        last = _read_bytes(filesystem, file, footer, numbers[STREAM_KEY], options)
        try:
            length = LENGTH_NBYTES + int.from_bytes(last[:LENGTH_NBYTES], "little")
            text, literals = bytes(last[LENGTH_NBYTES:length]), last[length:]
            return cls(file, footer, *parse_pieces(text, len(literals), footer, numbers), literals)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise FormatError(
                f"The list of a stream's pieces is invalid: {type(error).__name__}: {error}",
                path=footer.path,
                fqn=STREAM_KEY,
            ) from error


def _read_bytes(
    filesystem: Filesystem, file: DataFileRef, footer: Footer, number: int, options: LoadOptions
) -> memoryview:
    found: list[memoryview] = []
    (item,) = items_of_object(STREAM_KEY)
    # the bytes of a stream are no object, which is what others would check them as
    options = replace(options, safe=SafeLoader((), check_objects=False))
    take = Destinations({}, lambda _, data: found.append(data.getbuffer()))
    wanted = [Wanted(item, StoredAt(file, number), None)]
    load_items(filesystem, wanted, take, options, footers=partial(_given, [footer]))
    return found[0]


class StreamReader(RangeReader):
    """Read a file of `StreamWriter` as the stream that it is.

    Args:
        filesystem: the directory that the file is in; closed with the stream.
        index: what the file says of its stream.
        options: of the load.
    """

    def __init__(self, filesystem: Filesystem, index: StreamIndex, options: LoadOptions) -> None:
        super().__init__(filesystem)
        self._index, self._options, self.nbytes = index, options, index.nbytes

    def _read(self, start: int, stop: int, out: torch.Tensor) -> None:
        items, parts = list[Wanted](), dict[str, torch.Tensor]()
        edges: list[tuple[torch.Tensor, torch.Tensor]] = []  # of elements that the range has in part
        pieces, footer = self._index.pieces, self._index.footer
        first = bisect_right(pieces, start, key=lambda piece: piece.start) - 1
        last = bisect_left(pieces, stop, key=lambda piece: piece.start)
        ends = [*(piece.start for piece in pieces[first + 1 : last + 1]), self.nbytes]
        for piece, end in zip(pieces[first:last], ends, strict=False):
            begin = max(piece.start, start)
            target = out[begin - start : min(end, stop) - start]
            offset = piece.offset + begin - piece.start
            if piece.number == LITERALS:
                target.copy_(tensor_of(self._index.literals[offset : offset + len(target)]))
                continue
            number = self._index.records[piece.number]
            width = footer.records[number].element.nbytes
            low, high = offset // width, -(-(offset + len(target)) // width)
            memory = target
            if offset % width or len(target) % width or target.data_ptr() % width:
                memory = torch.empty((high - low) * width, dtype=torch.uint8, device="cpu")
                edges.append((target, memory[offset - low * width :]))
            self._want(items, parts, number, low, high, memory)
        if items:
            footers = partial(_given, [footer])
            load_items(self._filesystem, items, Destinations(parts), self._options, footers=footers)
        for target, memory in edges:
            target.copy_(memory[: len(target)])

    def _want(
        self,
        items: list[Wanted],
        parts: dict[str, torch.Tensor],
        number: int,
        low: int,
        high: int,
        memory: torch.Tensor,
    ) -> None:
        """Add items that read the elements from `low` to `high` of a record into memory, one after the other."""
        record = self._index.footer.records[number]
        dtype = torch_dtype(record.element)
        elements, at = memory.view(dtype), 0
        shard = Shard(record.offsets, record.shape, record.global_shape, dtype)
        for box in boxes_of_run(record.shape, low, high):
            key = str(len(parts))
            parts[key] = elements[at : at + box.elements].view(box.sizes)
            origin = torch.Size([0] * len(record.shape))
            item = ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(key),
                origin,
                MetadataIndex(record.fqn, torch.Size(record.offsets)),
                torch.Size(box.offsets),
                torch.Size(box.sizes),
            )
            items.append(Wanted(item, StoredAt(self._index.file, number), shard))
            at += box.elements


def _given(footers: list[Footer], *_: Any) -> list[Footer]:
    return footers
