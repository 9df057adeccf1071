"""A tensor in an opened checkpoint: what it is, and its parts when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_nvcomp.reading.selection import Selection, select

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
