"""Which shard of a tensor each rank has, computed for all ranks at once from meshes and placements.

A rank holds of a dimension a list of runs: one for `Shard`; for `_StridedShard`, by which FSDP2 cuts what tensor
parallelism has cut already, a run of each of `split_factor` pieces. The mesh's dimensions cut one after the other, as
torch's DTensor does it; pieces are those of `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Cut: TypeAlias = tuple[int, int]  # the tensor's dimension, and in how many pieces it is cut first


class IrregularError(Exception):
    """The ranks' shards are not such as meshes and placements describe; DCP has to plan them, or to refuse them."""


def shards_of(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None], places: npt.ArrayLike
) -> tuple[Ints, Ints]:
    """Return offsets and sizes, each (ranks, dimensions), of the shards at some places of a mesh.

    An empty shard's offset is the end of the dimension, as with DTensor.
    """
    at = np.asarray(places, np.int64).reshape(-1, len(mesh_shape))
    ranks = len(at)
    offsets = np.zeros((ranks, len(shape)), np.int64)
    sizes = np.broadcast_to(np.array(shape, np.int64), (ranks, len(shape))).copy()
    for dim in {cut[0] for cut in cuts if cut is not None}:
        begins, lengths = np.zeros((ranks, 1), np.int64), sizes[:, dim : dim + 1].copy()
        for mesh_dim, cut in enumerate(cuts):
            if cut is not None and cut[0] == dim:
                begins, lengths = _cut_runs(begins, lengths, cut[1], mesh_shape[mesh_dim], at[:, mesh_dim])
        first = begins[np.arange(ranks), np.argmax(lengths > 0, axis=1)]
        sizes[:, dim] = lengths.sum(1)
        offsets[:, dim] = np.where(sizes[:, dim] > 0, first, shape[dim])
    return offsets, sizes


def _cut_runs(begins: Ints, lengths: Ints, pieces: int, ranks: int, number: Ints) -> tuple[Ints, Ints]:
    """Cut runs, taken together, into pieces, and each piece among some ranks; return the runs of rank `number`."""
    starts = np.cumsum(lengths, axis=1) - lengths  # of each run, among all of them
    whole, parts = lengths.sum(1), []
    for piece in range(pieces):
        low, high = _piece(whole, pieces, np.full_like(number, piece))
        own_low, own_high = _piece(high - low, ranks, number)
        before = np.clip((low + own_low)[:, None] - starts, 0, lengths)
        parts.append((begins + before, np.clip((low + own_high)[:, None] - starts, 0, lengths) - before))
    return np.concatenate([part[0] for part in parts], 1), np.concatenate([part[1] for part in parts], 1)


def _piece(length: Ints, pieces: int, number: Ints) -> tuple[Ints, Ints]:
    full = -(-length // pieces)
    return np.minimum(length, full * number), np.minimum(length, full * (number + 1))


@dataclass(frozen=True, eq=False)
class Layout:
    """The shards of all keys of one kind on the same ranks, numbered by the first rank that has each."""

    shape: tuple[int, ...] | None  # of the whole tensor; None for objects, which have one shard without dimensions
    properties: tuple[Any, ...]  # the state of DCP's TensorProperties
    is_dtensor: bool
    offsets: Ints  # (shards, dimensions)
    sizes: Ints
    ranks: Ints  # that have a shard, ascending
    shard_at: Ints  # which of them, beside `ranks`
    holders: tuple[Ints, ...] | None  # the ranks that have each shard; None if it is one rank each
    apart: Ints  # the shards that ranks of several meshes have

    @property
    def shard_count(self) -> int:
        return len(self.offsets)

    @property
    def first_ranks(self) -> Ints:
        if self.holders is None:
            return self.ranks
        return np.array([ranks[0] for ranks in self.holders], np.int64)

    @property
    def dtype(self) -> Any:
        """The dtype of its tensors; None for objects."""
        return self.properties[0] if self.shape is not None else None

    @property
    def nbytes(self) -> Ints:
        """The size of each shard in memory; 0 for objects."""
        width: int = self.dtype.itemsize if self.shape is not None else 0
        return np.asarray(self.sizes.prod(1) * width)

    def has_shards_of(self, other: Layout) -> bool:
        """Return True if each rank has the same region of both."""
        mine, theirs = ((one.offsets, one.sizes, one.ranks, one.shard_at) for one in (self, other))
        return self.shape == other.shape and all(map(np.array_equal, mine, theirs))

    def shard_of(self, rank: int) -> int | None:
        at = int(np.searchsorted(self.ranks, rank))
        return int(self.shard_at[at]) if at < len(self.ranks) and self.ranks[at] == rank else None


def layout_of(
    shape: tuple[int, ...] | None,
    properties: tuple[Any, ...],
    *,
    is_dtensor: bool,
    ranks: Ints,
    offsets: Ints,
    sizes: Ints,
    members: Ints | None = None,
) -> Layout:
    """Return the layout of what some ranks have: `ranks` beside the rows of `offsets` and `sizes`.

    With `members`, who is in each rank's mesh, it says which shards ranks of several meshes have.

    Raises:
        IrregularError: the shards are no grid that fills the tensor.
    """
    order = np.argsort(ranks, kind="stable")
    ranks, offsets, sizes = ranks[order], offsets[order], sizes[order]
    if offsets.shape[1]:
        _, first, shard_at = np.unique(offsets, axis=0, return_index=True, return_inverse=True)
        shard_at = shard_at.reshape(-1)
    else:
        first, shard_at = np.zeros(1, np.int64), np.zeros(len(ranks), np.int64)
    by_rank = np.argsort(first, kind="stable")
    renumbered = np.empty(len(first), np.int64)
    renumbered[by_rank] = np.arange(len(first))
    shard_at, first = renumbered[shard_at], first[by_rank]
    if (sizes != sizes[first][shard_at]).any():
        raise IrregularError("Shards of several sizes begin at one place.")
    holders = None
    if len(first) < len(ranks):
        ends = np.cumsum(np.bincount(shard_at))[:-1]
        holders = tuple(np.split(ranks[np.argsort(shard_at, kind="stable")], ends))
    apart = np.zeros(0, np.int64)
    if members is not None and holders is not None:
        members = members[order]
        apart = np.unique(shard_at[members != members[first][shard_at]])
    offsets, sizes = offsets[first], sizes[first]
    if shape:
        _check_grid(shape, offsets, sizes)
    return Layout(shape, properties, is_dtensor, offsets, sizes, ranks, shard_at, holders, apart)


def _check_grid(shape: tuple[int, ...], offsets: Ints, sizes: Ints) -> None:
    """Make sure that shards fill a tensor without overlaps: that they are the cells of a grid, as placements make."""
    if 0 in shape:
        return
    full = sizes.min(1) > 0
    begins, ends, cells = offsets[full], (offsets + sizes)[full], 1
    if not len(begins):
        raise IrregularError("All shards are empty.")
    for dim, length in enumerate(shape):
        # with the counts, as without them it imports numpy.ma, which takes 10 ms of a first save
        runs, _ = np.unique(np.stack([begins[:, dim], ends[:, dim]], 1), axis=0, return_counts=True)
        if runs[0, 0] != 0 or runs[-1, 1] != length or (runs[1:, 0] != runs[:-1, 1]).any():
            raise IrregularError(f"Shards of {shape} are no grid.")
        cells *= len(runs)
    if cells != len(begins):
        raise IrregularError(f"{len(begins)} shards do not fill {shape}.")
