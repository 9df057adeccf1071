"""What a conversion moves: the entries of a source, each read piece by piece.

source  ->  entries  ->  (prefix cut off, dtype changed)  ->  target, which reads boxes of them as it writes
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_nvcomp.format.blocks import Box

__all__ = ["ObjectEntry", "Source", "TensorEntry", "TensorReader", "pieces", "selected"]

# A tensor is read and written in pieces of whole rows, of about this size.
PIECE_NBYTES = 32 << 20

Path = tuple[str | int, ...]


class TensorReader(ABC):
    """Reads parts of one stored tensor."""

    @abstractmethod
    def read(self, box: Box) -> torch.Tensor:
        """Return a box of it, a tensor of its own in host memory."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to convert.

    Attributes:
        key: its key.
        path: its place in the nested state dict.
        shape: its shape.
        dtype: what it is to become.
        reader: reads it, in its stored dtype.
    """

    key: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    reader: TensorReader

    @property
    def nbytes(self) -> int:
        """Size in the dtype that it is to become."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box) -> torch.Tensor:
        """Return a box of it, in the dtype that it is to become."""
        return self.reader.read(box).to(self.dtype)

    def read_all(self) -> torch.Tensor:
        """Return all of it."""
        return self.read(Box((0,) * len(self.shape), self.shape))


class ObjectReader(ABC):
    """Reads one Python object."""

    @abstractmethod
    def stored(self) -> bytes:
        """Return it as `torch.save` wrote it, without running anything of it."""

    @abstractmethod
    def value(self) -> Any:
        """Return the object, loaded with `weights_only=True`."""


@dataclass(frozen=True)
class ObjectEntry:
    """A Python object to convert; the attributes are those of `TensorEntry`."""

    key: str
    path: Path
    reader: ObjectReader


class Source(ABC):
    """A checkpoint to convert."""

    @property
    @abstractmethod
    def path(self) -> str:
        """Where it is, without passwords."""

    @abstractmethod
    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        """Return what is in it, in the order in which reading it is quickest."""

    @abstractmethod
    def close(self) -> None:
        """Close its storage."""


def pieces(shape: Sequence[int], element_nbytes: int, limit_nbytes: int = PIECE_NBYTES) -> Iterator[Box]:
    """Yield boxes of whole rows that together are a tensor, each of at most `limit_nbytes`, or of one row."""
    if not shape or not math.prod(shape):
        yield Box((0,) * len(shape), tuple(shape))
        return
    rest = (0,) * (len(shape) - 1)
    rows = max(1, limit_nbytes // (math.prod(shape[1:]) * element_nbytes))
    for start in range(0, shape[0], rows):
        yield Box((start, *rest), (min(rows, shape[0] - start), *shape[1:]))


def selected(
    entries: Sequence[TensorEntry | ObjectEntry], *, prefix: str, dtype: torch.dtype | None
) -> list[TensorEntry | ObjectEntry]:
    """Return the entries whose keys begin with a prefix, without it, floating-point tensors in another dtype."""
    found: list[TensorEntry | ObjectEntry] = []
    for entry in entries:
        if not entry.key.startswith(prefix):
            continue
        key = entry.key.removeprefix(prefix)
        path = _without(entry.path, prefix) if prefix else entry.path
        if isinstance(entry, TensorEntry) and dtype is not None and entry.dtype.is_floating_point:
            entry = replace(entry, dtype=dtype)
        found.append(replace(entry, key=key, path=path or (key,)))
    return found


def _without(path: Path, prefix: str) -> Path:
    """Return a path without the parts that a prefix of its key takes; () if the prefix ends within a part."""
    for length in range(1, len(path)):
        if f"{'.'.join(map(str, path[:length]))}." == prefix:
            return path[length:]
    return ()
