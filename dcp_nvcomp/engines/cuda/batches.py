"""The layout of a GPU batch: tables of addresses and lengths, built with numpy for many blocks at once.

A block's pieces (codecs/base.py) depend only on the chain, its length and its flags, so a `BlockLayout` is worked out
once, and so is a `BatchLayout`, of all blocks of a batch: the batches of a save have few shapes, and the next save has
the same ones. No Python runs per slice. Pure: knows no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import ALIGNMENT_NBYTES, FLAG_PACKED_REST, ArrayToBytes, CodecChain, Coder, padded
from dcp_nvcomp.codecs.transforms import PLANE_NAMES, Planes

I64 = npt.NDArray[np.int64]

# The kernels are compiled with these: threads of a thread block, and how much of a row one thread block works on.
THREADS = 256
TILE_NBYTES = 64 << 10

_MAX_ROW_NBYTES = 1 << 31
_KEPT_BATCHES = 64
_FLAGS_NBITS = 8


@dataclass(frozen=True)
class RowTable:
    """The table that a kernel is launched over: rows of u64 columns, and for each tile the number of its row."""

    rows: npt.NDArray[np.uint64]
    tiles: npt.NDArray[np.uint32]


def _row_table(columns: Sequence[I64], more: Sequence[I64], lengths: I64) -> RowTable:
    """Rows of `columns`, the number of the row's first tile, then `more`; tiles cover `lengths`."""
    assert lengths.dtype == np.int64
    first_tiles, tiles = _tiles(lengths.tobytes())
    found = [*columns, first_tiles, *more]
    rows = np.empty((lengths.size, len(found)), np.uint64)
    for number, column in enumerate(found):
        rows[:, number] = column
    return RowTable(rows, tiles)


@lru_cache(maxsize=64)  # most tables of a batch are over the same lengths, and the next batch's are too
def _tiles(of_lengths: bytes) -> tuple[I64, npt.NDArray[np.uint32]]:
    """Return the number of each row's first tile, and of each tile the number of its row."""
    lengths = np.frombuffer(of_lengths, np.int64)
    assert lengths.size == 0 or int(lengths.max()) <= _MAX_ROW_NBYTES
    counts = -(-lengths // TILE_NBYTES)
    tiles = np.repeat(np.arange(lengths.size, dtype=np.uint32), counts)
    tiles.setflags(write=False)  # they are other tables' too
    return np.cumsum(counts) - counts, tiles


def block_table(data: I64, nbytes: I64, width: I64, flags: I64, planes: I64) -> RowTable:
    """Return the table of inspect_blocks, split_blocks and merge_blocks."""
    return _row_table([data, nbytes, width, flags], list(planes.T), nbytes)


def copy_table(source: I64, target: I64, nbytes: I64, zeros: I64) -> RowTable:
    """Return the table of copy_pieces: `nbytes` bytes from `source` to `target`, then `zeros` zero bytes."""
    return _row_table([source, target, nbytes, zeros], [], nbytes + zeros)


def padded_nbytes(nbytes: I64) -> I64:
    """Return each length rounded up to the alignment of slices and planes."""
    return (nbytes + (ALIGNMENT_NBYTES - 1)) // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES


def starts_of(lengths: I64) -> I64:
    """Return the starts of adjacent ranges of these lengths and, last, the end of the last one."""
    starts = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def lengths_of(starts: I64) -> I64:
    """Return the lengths of adjacent ranges, from their starts and, last, the end of the last one."""
    return starts[1:] - starts[:-1]  # of a few hundred in a sixth of `np.diff`'s time


def split_width(codec: ArrayToBytes) -> int:
    """Return the bytes of each float that the kernels split into planes; 1 if they copy the block as it is."""
    return codec.float_nbytes if isinstance(codec, Planes) else 1


def _pack_flag(codec: ArrayToBytes) -> int:
    return codec.check_flags(FLAG_PACKED_REST) * FLAG_PACKED_REST


@dataclass(frozen=True)
class BlockLayout:
    """The pieces of a block of one length, and its planes in scratch memory."""

    lengths: I64  # decoded length of each piece, in stored order
    coded: npt.NDArray[np.bool_]  # whether each piece is a slice
    places: I64  # where each piece lies in the block's scratch memory; in the block itself for a chain without planes
    scratch_nbytes: int  # how much scratch memory the block takes
    planes: tuple[int, int, int]
    first_pieces: tuple[int, int, int]  # the piece with which each of these planes begins; -1 for one that is not there
    slice_nbytes: tuple[int, ...]  # decoded length of each slice
    stored_nbytes: int  # room of the pieces that are not slices


def _layout(chain: CodecChain, nbytes: int, flags: int, every_plane: bool) -> BlockLayout:
    codec, has_coder = chain.array_to_bytes, chain.coder is not None
    places: list[int] = []
    scratch_nbytes = 0
    # places are those of unpacked planes: split needs them before the flags are known, and they are never too small
    unpacked = codec.layout(nbytes, 0, has_coder)
    for plane in unpacked:
        in_scratch = plane.coded or (every_plane and not codec.is_plain)
        places.append(scratch_nbytes if in_scratch else -1)
        scratch_nbytes += padded(plane.nbytes) if in_scratch else 0
    pieces = chain.layout(nbytes, flags)
    planes, first_pieces = [-1, -1, -1], [-1, -1, -1]
    for index, plane in enumerate(unpacked):
        if plane.name in PLANE_NAMES:
            column = PLANE_NAMES.index(plane.name)
            planes[column] = places[index]
            first_pieces[column] = next((at for at, piece in enumerate(pieces) if piece.plane == index), -1)
    lengths = np.array([piece.nbytes for piece in pieces], np.int64)
    coded = np.array([piece.coded for piece in pieces], np.bool_)
    return BlockLayout(
        lengths=lengths,
        coded=coded,
        places=np.array([max(places[piece.plane], 0) + piece.start for piece in pieces], np.int64),
        scratch_nbytes=scratch_nbytes,
        planes=(planes[0], planes[1], planes[2]),
        first_pieces=(first_pieces[0], first_pieces[1], first_pieces[2]),
        slice_nbytes=tuple(lengths[coded].tolist()),
        stored_nbytes=int(padded_nbytes(lengths[~coded]).sum()),
    )


class Layouts:
    """Layouts, remembered: almost all blocks of a record have one of two."""

    def __init__(self, *, every_plane: bool) -> None:
        self._every_plane = every_plane
        # by the chain's id, as its hash takes longer than all else that is done for a block; the chain is kept with it
        self._layouts: dict[tuple[int, int, int], tuple[CodecChain, BlockLayout]] = {}

    def get(self, chain: CodecChain, nbytes: int, flags: int) -> BlockLayout:
        """Return the layout of a block of `nbytes` decoded bytes with these flags."""
        key = (id(chain), nbytes, flags)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) > 4096:
                self._layouts.clear()
            found = self._layouts[key] = chain, _layout(chain, nbytes, flags, self._every_plane)
        return found[1]


@dataclass(frozen=True)
class Pieces:
    """The pieces of all blocks of a batch."""

    block: I64  # the number of each piece's block
    bounds: I64  # of each block, its first piece; one more at the end
    lengths: I64
    coded: npt.NDArray[np.bool_]  # whether each piece is a slice
    places: I64  # their places in scratch memory, relative to their block's


# The chains of a batch, and of how many blocks on end each is.
ChainRuns = tuple[tuple[CodecChain, int], ...]


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """The layouts of a batch's blocks, joined."""

    runs: ChainRuns
    kinds: tuple[tuple[CodecChain, int, int], ...]  # the blocks that differ: by chain, length and flags
    kind_of_block: I64  # of each block, as is all that follows
    nbytes: I64
    flags: I64
    is_plain: npt.NDArray[np.bool_]  # True if it is not split into planes
    widths: I64  # see `split_width`
    packs: I64  # the flag that it has if all of its signs are the same; 0 if its codec has none
    planes: I64  # three columns, see `BlockLayout`
    first_pieces: I64  # likewise
    scratch_nbytes: I64
    scratch_starts: I64  # one more at the end
    pieces: Pieces
    coders: dict[Coder, int]  # with a number each
    coder_of_piece: I64  # the number of its block's coder; -1 without one
    slice_bounds: I64  # of each block, its first slice; one more at the end

    @cached_property
    def slices(self) -> I64:
        """The pieces that are slices."""
        return np.flatnonzero(self.pieces.coded)

    @cached_property
    def slice_places(self) -> I64:
        """Where each slice lies in the batch's scratch memory."""
        pieces = self.pieces
        return (self.scratch_starts[pieces.block] + pieces.places)[self.slices]

    @cached_property
    def slices_of_coders(self) -> list[tuple[Coder, I64]]:
        """Which of the slices each coder codes, if any."""
        numbers = self.coder_of_piece[self.slices]
        found = [(coder, np.flatnonzero(numbers == number)) for coder, number in self.coders.items()]
        return [(coder, which) for coder, which in found if which.size]


class BatchLayouts:
    """Layouts of batches, remembered."""

    def __init__(self, *, every_plane: bool) -> None:
        self._blocks = Layouts(every_plane=every_plane)
        # by ids, as a chain's hash takes longer than all else; the layout holds the chains
        self._batches: dict[tuple[tuple[tuple[int, int], ...], bytes, bytes], BatchLayout] = {}

    def get(self, runs: ChainRuns, nbytes: I64, flags: I64) -> BatchLayout:
        """Return the layout of a batch of blocks of these lengths with these flags."""
        key = tuple([(id(chain), count) for chain, count in runs]), nbytes.tobytes(), flags.tobytes()
        found = self._batches.get(key)
        if found is None:
            if len(self._batches) >= _KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            found = self._batches[key] = self._joined(runs, nbytes, flags)
        return found

    def _joined(self, runs: ChainRuns, nbytes: I64, flags: I64) -> BatchLayout:
        """Work it out: a load may never meet the same batch again, so what is done for each block is numpy's."""
        chains = {id(chain): chain for chain, _ in runs}
        numbers = {known: number for number, known in enumerate(chains)}
        chain_of_run = np.array([numbers[id(chain)] for chain, _ in runs], np.int64)
        chain_of_block = np.repeat(chain_of_run, [count for _, count in runs])
        # each block as one number: np.unique of rows takes 25 times as long
        assert not (flags >> _FLAGS_NBITS).any() and int(nbytes.max(initial=0)) <= _MAX_ROW_NBYTES
        numbered = chain_of_block << 40 | nbytes << _FLAGS_NBITS | flags
        _, firsts, which = np.unique(numbered, return_index=True, return_inverse=True)
        rows = zip(chain_of_block[firsts].tolist(), nbytes[firsts].tolist(), flags[firsts].tolist(), strict=True)
        known = [*chains.values()]
        kinds = tuple([(known[number], length, flag) for number, length, flag in rows])
        layouts = [self._blocks.get(*kind) for kind in kinds]
        codecs = [chain.array_to_bytes for chain, _, _ in kinds]
        coders: dict[Coder, int] = {}
        coder_of_kind = [
            -1 if chain.coder is None else coders.setdefault(chain.coder, len(coders)) for chain, _, _ in kinds
        ]
        pieces = _join_pieces(layouts, which)
        scratch_nbytes = np.array([layout.scratch_nbytes for layout in layouts], np.int64)[which]
        return BatchLayout(
            runs=runs,
            kinds=kinds,
            kind_of_block=which,
            nbytes=nbytes,
            flags=flags,
            is_plain=np.array([codec.is_plain for codec in codecs], np.bool_)[which],
            widths=np.array([split_width(codec) for codec in codecs], np.int64)[which],
            packs=np.array([_pack_flag(codec) for codec in codecs], np.int64)[which],
            planes=np.array([layout.planes for layout in layouts], np.int64).reshape(-1, 3)[which],
            first_pieces=np.array([layout.first_pieces for layout in layouts], np.int64).reshape(-1, 3)[which],
            scratch_nbytes=scratch_nbytes,
            scratch_starts=starts_of(scratch_nbytes),
            pieces=pieces,
            coders=coders,
            coder_of_piece=np.array(coder_of_kind, np.int64)[which][pieces.block],
            slice_bounds=starts_of(np.array([len(layout.slice_nbytes) for layout in layouts], np.int64)[which]),
        )


class BlockCosts:
    """The memory that coding each block of a batch takes, remembered with its layout.

    Args:
        of_block: returns it, of a chain, a length and flags.
    """

    def __init__(self, of_block: Callable[[CodecChain, int, int], int]) -> None:
        self._of_block = of_block
        self._known: WeakKeyDictionary[BatchLayout, I64] = WeakKeyDictionary()

    def get(self, layout: BatchLayout) -> I64:
        """Return the memory of each block."""
        found = self._known.get(layout)
        if found is None:
            costs = np.array([self._of_block(*kind) for kind in layout.kinds], np.int64)
            found = self._known[layout] = costs[layout.kind_of_block]
        return found


def _join_pieces(layouts: Sequence[BlockLayout], which: I64) -> Pieces:
    """Return the pieces of several blocks, one block after the other; `which` layout each of them has."""
    counts = np.array([layout.lengths.size for layout in layouts], np.int64)
    bounds, firsts = starts_of(counts[which]), starts_of(counts)[which]
    block = np.repeat(np.arange(which.size), counts[which])
    at = np.arange(bounds[-1]) + (firsts - bounds[:-1])[block]
    return Pieces(
        block=block,
        bounds=bounds,
        lengths=np.concatenate([layout.lengths for layout in layouts])[at],
        coded=np.concatenate([layout.coded for layout in layouts])[at],
        places=np.concatenate([layout.places for layout in layouts])[at],
    )


def size_classes(lengths: I64, slice_nbytes: int) -> list[tuple[int, I64]]:
    """Slices grouped by length, as nvCOMP wants output room for the longest input of a batch for each of them."""
    remaining = np.arange(lengths.size)
    groups: list[tuple[int, I64]] = []
    ceiling = slice_nbytes
    while remaining.size:
        floor = ceiling // 4 if ceiling > 4096 else 0
        large = lengths[remaining] > floor
        if large.any():
            groups.append((ceiling, remaining[large]))
        remaining = remaining[~large]
        ceiling = floor
    return groups


class Blocks(Protocol):
    """Consecutive blocks of one chain, to encode or to decode."""

    @property
    def count(self) -> int: ...
    def part(self, first: int, stop: int) -> Any: ...  # some of them, as one of its kind


B = TypeVar("B", bound=Blocks)


def part_of(works: Sequence[B], first: int, stop: int) -> list[B]:
    """Return some of the blocks of several, numbered through all of them."""
    found, begin = [], 0
    for work in works:
        end = begin + work.count
        if begin < stop and first < end:
            found.append(work.part(max(first - begin, 0), min(stop, end) - begin))
        begin = end
    return found


def fitting(costs: Sequence[int], start: int, most: int, budget_nbytes: int) -> int:
    """Return how many items from `start` on fit into a budget together: at least one, at most `most`."""
    asked = costs[start : start + most]
    if sum(asked) <= budget_nbytes:
        return len(asked)
    return max(int(np.searchsorted(np.cumsum(asked), budget_nbytes, side="right")), 1)
