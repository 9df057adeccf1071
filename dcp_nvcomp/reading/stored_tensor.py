"""A tensor in an opened checkpoint: what it is, and its parts when they are asked for: `stored[10:12, ..., -1]`."""

from __future__ import annotations

import io
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_nvcomp.errors import CheckpointError, MetadataError
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.metadata.rank_metadata import check_cover


@dataclass(frozen=True)
class Selection:
    """What an index asks for."""

    box: Box  # the elements to read
    taken: tuple[int | slice, ...]  # of each dimension of the box which of them, as an index: 0 drops the dimension

    @property
    def is_whole_box(self) -> bool:
        """True if all of the box is taken, as it is."""
        return all(one == slice(None) for one in self.taken)


def select(index: Any, shape: Sequence[int]) -> Selection:
    """Return what an index of a tensor of this shape asks for."""
    offsets, sizes, taken = list[int](), list[int](), list[int | slice]()
    for one, length in zip(_per_dimension(index, len(shape)), shape, strict=True):
        if isinstance(one, slice):
            if one.step == 0:
                raise IndexError("The step of a slice can't be 0.")
            start, stop, step = one.indices(length)
            if step < 0:
                raise TypeError("A stored tensor is read forwards: read it, and flip what you got.")
            count = len(range(start, stop, step))
            offsets.append(start if count else 0)
            sizes.append((count - 1) * step + 1 if count else 0)
            taken.append(slice(None) if step == 1 else slice(None, None, step))
        else:
            at = one + length if one < 0 else one
            if not 0 <= at < length:
                raise IndexError(f"Index {one} is out of range for a dimension of {length}.")
            offsets.append(at)
            sizes.append(1)
            taken.append(0)
    return Selection(Box(tuple(offsets), tuple(sizes)), tuple(taken))


def _per_dimension(index: Any, dims: int) -> list[int | slice]:
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("An index can only have one ellipsis.")
    given = len(parts) - len(ellipses)
    if given > dims:
        raise IndexError(f"The tensor has {dims} dimensions; the index has {given}.")
    at = ellipses[0] if ellipses else len(parts)
    parts[at : at + len(ellipses)] = [slice(None)] * (dims - given)
    return [part if isinstance(part, slice) else _integer(part) for part in parts]


def _integer(part: Any) -> int:
    try:
        if not isinstance(part, bool):
            return operator.index(part)
    except TypeError:
        pass
    raise TypeError(
        f"A stored tensor takes integers, slices and an ellipsis, not {type(part).__name__}: read it with [...], and "
        "index what you got."
    )


_Read = Callable[[str, TensorStorageMetadata, Selection], Any]


class StoredTensor:
    """A tensor of a checkpoint, of which an index reads a part: `stored[10:12]`, `stored[..., 0]`, `stored[...]`.

    Attributes:
        shape: of the whole tensor.
        dtype: as it was saved.
    """

    def __init__(self, key: str, described: TensorStorageMetadata, read: _Read) -> None:
        self._key, self._described, self._read = key, described, read
        self.shape: torch.Size = described.size
        self.dtype: torch.dtype = described.properties.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Uncompressed size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("A tensor without dimensions has no length.")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Read a part: only the blocks that it overlaps, and its file's footer the first time.

        Args:
            index: integers, slices with a positive step, an ellipsis.

        Returns:
            A tensor or an array of its own.

        Raises:
            IndexError: the index is out of range.
            TypeError: it is a list, a mask or None.
            CheckpointError: the data can't be read.
        """
        return self._read(self._key, self._described, select(index, self.shape))

    def __repr__(self) -> str:
        return f"<StoredTensor {self._key!r}: {self.dtype}, {list(self.shape)}>"


def items_of_box(fqn: str, described: TensorStorageMetadata, box: Box, *, path: str) -> list[ReadItem]:
    """Return the items that together are a box of a tensor."""
    if not box.elements:
        return []
    items = []
    for number, shard in enumerate(described.chunks):
        part = Box(tuple(shard.offsets), tuple(shard.sizes)).intersect(box)
        if part is not None:
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(fqn),
                    torch.Size(part.relative_to(box.offsets).offsets),
                    MetadataIndex(fqn, shard.offsets, number),
                    torch.Size(part.relative_to(shard.offsets).offsets),
                    torch.Size(part.sizes),
                )
            )
    found = sum(math.prod(item.lengths) for item in items)
    if found != box.elements:
        raise MetadataError(
            f"The shards that `.metadata` lists hold {found} of {box.elements} elements of {box}.", path=path, fqn=fqn
        )
    try:  # some may overlap, and a part be missing
        check_cover(torch.Size(box.sizes), [(item.dest_offsets, item.lengths) for item in items])
    except CheckpointError as error:
        error.path, error.fqn = path, fqn
        raise
    return items


def items_of_object(fqn: str) -> list[ReadItem]:
    """Return the item that is a Python object."""
    none = torch.Size([0])
    return [ReadItem(LoadItemType.BYTE_IO, MetadataIndex(fqn), none, MetadataIndex(fqn), none, none)]


class Destinations:
    """Where items go: a tensor for each key."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], take_object: Callable[[str, io.BytesIO], None] | None = None
    ) -> None:
        self._tensors = tensors
        self._take_object = take_object

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = Box(tuple(read_item.dest_offsets), tuple(read_item.lengths))
        tensor: torch.Tensor = self._tensors[read_item.dest_index.fqn][box.index]
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert self._take_object is not None
        self._take_object(read_item.dest_index.fqn, value)
