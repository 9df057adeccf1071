"""What a conversion moves: the entries of a source, of which the target reads boxes; and from where to where."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from dcp_nvcomp.calls.values import Path, fqn_of
from dcp_nvcomp.errors import CheckpointExistsError, ConfigurationError
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.recognition import file_at, is_local, linked_to
from dcp_nvcomp.options import parent_and_name
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem, real_place

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


def is_file(path: str, options: Mapping[str, Any]) -> bool:
    """Return whether there is a file, and not a directory, at a path or URL."""
    with contextlib.closing(open_filesystem(path, storage_options=options)) as filesystem:
        found = file_at(filesystem)
    if found is not None:
        found[0].close()
    return found is not None


def exists_already(filesystem: Filesystem, name: str) -> CheckpointExistsError:
    """Return the error of a file that may not be replaced."""
    return CheckpointExistsError(
        "There is such a file already; overwrite=True, or --overwrite, replaces it.", path=filesystem.location(name)
    )


def check_no_overlap(files: Sequence[str], destination: str, writes: Callable[[str], bool] | None) -> None:
    """Refuse a destination whose files are read by the same conversion."""
    there = real_place(destination)
    for file in files:
        parent, name = parent_and_name(file)
        ways = {real_place(file), f"{real_place(parent).rstrip('/')}/{name}"}
        for way in ways:
            folder, _, last = way.rpartition("/")
            if way == there if writes is None else (folder or "/") == there and writes(last):
                raise ConfigurationError(
                    "The conversion would write over a file that it reads: choose another destination.", path=file
                )


def stamps(files: Sequence[str], options: Mapping[str, Any]) -> list[list[Any]]:
    """Return name, size and time of writing of files, by which they are known from others at the same place."""
    if files and is_local(files[0]):
        found = [(file, os.stat(file)) for file in map(linked_to, files) if os.path.exists(file)]
        return [[file, status.st_size, status.st_mtime_ns] for file, status in found]
    listed: dict[str, dict[str, list[Any]]] = {}
    for file in files:
        parent, _ = parent_and_name(file)
        if parent not in listed:
            with contextlib.closing(open_filesystem(parent, storage_options=options)) as filesystem:
                listed[parent] = {one.name: [one.nbytes, one.modified_seconds] for one in filesystem.list_files()}
    places = [parent_and_name(file) for file in files]
    return [[without_secrets(real_place(f"{parent}/{name}")), *listed[parent].get(name, [])] for parent, name in places]
