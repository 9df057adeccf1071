"""What a conversion moves: the entries of a source, of which the target reads boxes as it writes."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from dcp_nvcomp.calls.flattening import Path, fqn_of
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.format.blocks import Box

# A tensor is read and written in pieces of at most this size.
PIECE_NBYTES = 32 << 20


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to convert."""

    key: str
    path: Path  # its place in the nested state dict
    shape: tuple[int, ...]
    dtype: torch.dtype  # what it is to become
    read_stored: Callable[[Box], torch.Tensor]  # returns a box of it in its stored dtype, a tensor in host memory
    position: int = 0  # of its place in the state, which entries of a checkpoint are not sorted by
    memory: Hashable = None  # what tensors that are tied have in common; None if nothing is known of ties

    @property
    def nbytes(self) -> int:
        """Size in the dtype that it is to become."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box) -> torch.Tensor:
        """Return a box of it, in the dtype that it is to become."""
        return self.read_stored(box).to(self.dtype)

    def read_all(self) -> torch.Tensor:
        """Return all of it."""
        return self.read(Box((0,) * len(self.shape), self.shape))


@dataclass(frozen=True)
class ObjectEntry:
    """A Python object to convert."""

    key: str
    path: Path
    stored: Callable[[], bytes]  # returns it as `torch.save` wrote it, without running anything of it
    value: Callable[[], Any]  # returns the object, loaded with `weights_only=True`
    position: int = 0


def paths_in_order(entries: Iterable[TensorEntry | ObjectEntry]) -> dict[str, Path]:
    """Return the places of entries by key, in the order of the state."""
    return {entry.key: entry.path for entry in sorted(entries, key=attrgetter("position"))}


class Source(ABC):
    """A checkpoint to convert."""

    path: str  # without passwords
    files: Sequence[str]  # that it reads, each a local path or a URL
    has_keys: bool = True  # whether the paths of its entries have the keys of dicts as they were, and not as text

    @abstractmethod
    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        """Return what is in it, in the order in which reading it is quickest."""

    @abstractmethod
    def close(self) -> None:
        """Close its storage."""


def pieces(shape: Sequence[int], element_nbytes: int, limit_nbytes: int = PIECE_NBYTES) -> Iterator[Box]:
    """Yield boxes of at most `limit_nbytes` that together are a tensor, one after the other as it lies in memory."""
    if not shape or not math.prod(shape):
        yield Box((0,) * len(shape), tuple(shape))
        return
    split = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) * element_nbytes <= limit_nbytes)
    rest = shape[split + 1 :]
    rows = max(1, limit_nbytes // (math.prod(rest) * element_nbytes))
    for before in itertools.product(*map(range, shape[:split])):
        for start in range(0, shape[split], rows):
            sizes = (*(1 for _ in before), min(rows, shape[split] - start), *rest)
            yield Box((*before, start, *(0 for _ in rest)), sizes)


def selected(
    entries: Sequence[TensorEntry | ObjectEntry], *, prefix: str, dtype: torch.dtype | None
) -> list[TensorEntry | ObjectEntry]:
    """Return the entries whose keys begin with a prefix, without it, floating-point tensors in another dtype."""
    found: list[TensorEntry | ObjectEntry] = []
    for entry in entries:
        if not entry.key.startswith(prefix):
            continue
        key = entry.key.removeprefix(prefix)
        if prefix and not key:
            raise ConfigurationError(
                f"prefix={prefix!r} is a whole key, of which nothing would be left: end it with a dot, or before one.",
                fqn=entry.key,
            )
        if prefix and key.startswith("."):
            raise ConfigurationError(
                f"prefix={prefix!r} would leave names such as {key!r}: end it with a dot, {prefix + '.'!r}.",
                fqn=entry.key,
            )
        path = _without(entry.path, prefix) if prefix else entry.path
        if isinstance(entry, TensorEntry) and dtype is not None and entry.dtype.is_floating_point:
            entry = replace(entry, dtype=dtype)
        found.append(replace(entry, key=key, path=path or (key,)))
    return found


def _without(path: Path, prefix: str) -> Path:
    """Return a path without the parts that a prefix of its key takes; () if the prefix ends within a part."""
    for length in range(1, len(path)):
        if f"{fqn_of(path[:length])}." == prefix:
            return path[length:]
    return ()
