"""Checks of frames on the host, before a GPU sees them: Zstandard (RFC 8878) and deflate (RFC 1951).

A decoder on a GPU may take its input for valid, and do anything with what is not; a CRC keeps out what changed since it
was written, not what was written wrong. So all is checked that can be read without decoding:

zstd      frame header, chain of blocks, literals section, lengths of its streams, sequences header
deflate   chain of stored blocks at the beginning, header of the block after it

A fault does not prove that a frame is corrupt: libzstd takes a few that the RFC forbids, and what no encoder has a
reason to write is a fault too. The CPU engine has the last word on it.

All frames of a batch are looked at together, a block of each in every round: no Python runs per frame. Whatever is
read lies within the given memory, whatever the frames say.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import Coder
from dcp_nvcomp.codecs.coders import Deflate, Zstd
from dcp_nvcomp.engines.cuda.batches import I64

U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_BLOCK_NBYTES: Final = 128 << 10
_ZSTD_WINDOW_NBYTES: Final = 8 << 20  # what every decoder must have
_ZSTD_CODE_NBITS: Final = 11
_RLE, _COMPRESSED, _RESERVED = 1, 2, 3  # types of zstd's blocks, and of literals but for the last; 0 is raw

# A bit more than 1032 bytes from one: the longest match of deflate in the fewest bits.
_DEFLATE_RATIO: Final = 1033

# More blocks than encoders make, each of them a round for all frames: so many, and one for each KiB that comes out of a
# frame, as zstd's smallest window has.
_MOST_BLOCKS: Final = 256
_NBYTES_PER_BLOCK: Final = 1024


def _table(*values: int) -> I64:
    return np.array(values, np.int64)


# By the two lowest bits of the frame's descriptor, by its two highest, and whether the frame is a single segment.
_DICTIONARY_ID_NBYTES = _table(0, 1, 2, 4)
_CONTENT_FIELD_NBYTES = _table(0, 2, 4, 8, 1, 2, 4, 8)
_MASKS = _table(*((1 << 8 * nbytes) - 1 for nbytes in range(8)), -1)  # of fields of 0 to 8 bytes

# By the lowest four bits of the literals section, its type and size format.
_LITERALS_HEADER_NBYTES = _table(1, 1, 3, 3, 2, 2, 3, 3, 1, 1, 4, 4, 3, 3, 5, 5)
_LITERALS_SHIFT = _table(3, 3, 4, 4, 4, 4, 4, 4, 3, 3, 4, 4, 4, 4, 4, 4)
_LITERALS_NBITS = _table(5, 5, 10, 10, 12, 12, 10, 10, 5, 5, 14, 14, 20, 20, 18, 18)

# By the modes of the three tables of sequences: what these take at least, and True if one repeats an earlier table.
_MODES = [(modes >> 6, modes >> 4 & 3, modes >> 2 & 3) for modes in range(256)]
_TABLES_NBYTES = _table(*(sum(mode in (1, 2) for mode in modes) for modes in _MODES))
_REPEATS = np.array([3 in modes for modes in _MODES])

_AFTER_SEQUENCES: Final = "there is more after the last zstd sequence"

_BIT_LENGTHS = _table(*(byte.bit_length() for byte in range(256)))


def frame_faults(coder: Coder, memory: U8, starts: I64, nbytes: I64, lengths: I64) -> dict[int, str]:
    """Return the numbers of the frames that a GPU must not see, and what is wrong with each."""
    frames = _Frames(memory, starts, nbytes, lengths)
    if starts.size and isinstance(coder, Zstd):
        _check_zstd(frames)
    elif starts.size and isinstance(coder, Deflate):
        _check_deflate(frames)
    return frames.faults


def _those(mask: Bools) -> slice | I64:
    """Return an index of the places where it is True, one that copies nothing if it is True everywhere."""
    return slice(None) if mask.all() else mask.nonzero()[0]


class _Frames:
    """Frames that are looked at, and the faults that were found."""

    def __init__(self, memory: U8, starts: I64, nbytes: I64, lengths: I64) -> None:
        if memory.size < 8:
            memory = np.concatenate([memory, np.zeros(8 - memory.size, np.uint8)])
        self._memory = np.ascontiguousarray(memory)
        self._words = np.ndarray((memory.size - 7,), "<i8", self._memory.data, strides=(1,))
        self._last_word = memory.size - 8
        self.numbers = np.arange(starts.size)
        self.starts, self.stops, self.lengths = starts, starts + nbytes, lengths
        self.faults: dict[int, str] = {}
        self.good = np.ones(starts.shape, np.bool_)

    def words(self, at: I64) -> I64:
        """Return the eight bytes from each place on as numbers; of those after the memory, anything."""
        inside = np.minimum(at, self._last_word)
        words: I64 = self._words[inside] >> (at - inside << 3)
        return words

    def bytes_at(self, at: I64) -> U8:
        """Return the byte at each place; for a place outside of the memory, any."""
        return self._memory.take(at, mode="clip")

    def demand(self, numbers: I64, *demands: tuple[Bools, str]) -> None:
        """Note the frames for which something does not hold, unless a fault of theirs is known."""
        holds = demands[0][0]
        for more, _ in demands[1:]:
            holds = holds & more
        if holds.all():
            return
        for at in np.flatnonzero(~holds).tolist():
            what = next(what for each, what in demands if not each[at])
            self.faults.setdefault(int(numbers[at]), what)
        self.good[numbers[~holds]] = False

    def demand_few_blocks(self, numbers: I64, rounds: int) -> None:
        """Note the frames of which so many blocks are more than an encoder makes."""
        if rounds > _MOST_BLOCKS:
            few = rounds <= _MOST_BLOCKS + self.lengths[numbers] // _NBYTES_PER_BLOCK
            self.demand(numbers, (few, "it has very many blocks"))


# ---- zstd ------------------------------------------------------------------------------------------------------------


def _check_zstd(frames: _Frames) -> None:
    at, stops, limits = _zstd_frame_headers(frames)
    least, most = np.zeros_like(at), np.zeros_like(at)
    has_table, has_sequences = np.zeros(at.shape, np.bool_), np.zeros(at.shape, np.bool_)
    live, rounds = frames.numbers[_those(frames.good)], 0
    while live.size:
        rounds += 1
        frames.demand_few_blocks(live, rounds)
        begin, stop, limit = at[live], stops[live], limits[live]
        header = frames.words(begin)
        is_last, kind, size = header & 1 == 1, header >> 1 & 3, header >> 3 & 0x1FFFFF
        compressed = kind == _COMPRESSED
        following = begin + 3 + np.where(kind == _RLE, 1, size)
        frames.demand(
            live,
            (following <= stop, "a zstd block does not fit into its frame"),
            (kind != _RESERVED, "a zstd block is of the reserved type"),
            (size <= limit, "a zstd block is longer than its frame allows"),
            (is_last <= (following == stop), "there is more after the last zstd block"),
        )
        at[live] = following
        shortest, longest = size, size
        if compressed.any():
            shortest, longest = size.copy(), size.copy()
            which = _those(compressed)
            blocks = _Blocks(frames, live[which], begin[which] + 3, following[which], limit[which])
            shortest[which], longest[which] = blocks.check(header[which] >> 24, has_table, has_sequences)
        least[live] += shortest
        most[live] += longest
        live = live[~is_last & frames.good[live]]
    frames.demand(
        frames.numbers,
        (least <= frames.lengths, "its zstd blocks are more than the slice"),
        (most >= frames.lengths, "its zstd blocks are less than the slice"),
    )


def _zstd_frame_headers(frames: _Frames) -> tuple[I64, I64, I64]:
    """Return where each frame's blocks begin and end, and how long one may be."""
    starts, lengths = frames.starts, frames.lengths
    word = frames.words(starts)
    descriptor = word >> 32 & 0xFF
    is_single = descriptor >> 5 & 1
    dictionary_nbytes = _DICTIONARY_ID_NBYTES[descriptor & 3]
    dictionary_at = starts + 6 - is_single
    no_dictionary = dictionary_nbytes == 0
    if not no_dictionary.all():
        no_dictionary = frames.words(dictionary_at) & _MASKS[dictionary_nbytes] == 0
    field_at = dictionary_at + dictionary_nbytes
    field_nbytes = _CONTENT_FIELD_NBYTES[descriptor >> 6 | is_single << 2]
    field = (frames.words(field_at) & _MASKS[field_nbytes]) + ((field_nbytes == 2) << 8)
    window = word >> 40 & 0xFF
    window_base = 1 << 10 + (window >> 3)
    window_nbytes = np.where(is_single == 1, lengths, window_base + (window_base >> 3) * (window & 7))
    begin, stop = field_at + field_nbytes, frames.stops - (descriptor & 4)
    frames.demand(
        frames.numbers,
        (word & 0xFFFFFFFF == _ZSTD_MAGIC, "it is no zstd frame"),
        (begin + 3 <= stop, "it ends within its zstd header"),
        (descriptor & 8 == 0, "a reserved bit of its zstd header is set"),
        (no_dictionary, "it needs a dictionary"),
        ((field_nbytes == 0) | (field == lengths), "its zstd header has another length than the slice"),
        (window_nbytes <= np.maximum(2 * lengths, _ZSTD_WINDOW_NBYTES), "its zstd window is very large"),
    )
    return begin, stop, np.minimum(window_nbytes, _ZSTD_BLOCK_NBYTES)


class _Blocks:
    """Compressed zstd blocks, at most one of each frame."""

    def __init__(self, frames: _Frames, numbers: I64, begin: I64, stop: I64, limit: I64) -> None:
        self._frames, self._numbers = frames, numbers
        self._begin, self._stop, self._limit = begin, stop, limit

    def check(self, header: I64, has_table: Bools, has_sequences: Bools) -> tuple[I64, I64]:
        """Check the blocks, and return the least and the most that can come out of each."""
        kind, form = header & 3, header & 15
        is_huffman = kind >= 2
        nbits = _LITERALS_NBITS[form]
        count = header >> _LITERALS_SHIFT[form] & (1 << nbits) - 1
        coded = header >> nbits + 4 & (1 << nbits) - 1
        literals_at = self._begin + _LITERALS_HEADER_NBYTES[form]
        sequences_at = literals_at + np.where(is_huffman, coded, np.where(kind == _RLE, 1, count))
        self._frames.demand(
            self._numbers,
            (count <= self._limit, "a zstd block has more literals than it may have bytes"),
            (sequences_at < self._stop, "zstd literals do not fit into their block"),
        )
        if is_huffman.any():
            huffman = _those(is_huffman)
            self._check_streams(
                self._numbers[huffman],
                literals_at[huffman],
                sequences_at[huffman],
                count[huffman],
                form[huffman] < 4,
                kind[huffman] == 2,
                has_table,
            )
        return self._check_sequences(sequences_at, count, has_sequences)

    def _check_streams(
        self, numbers: I64, at: I64, stop: I64, count: I64, is_one: Bools, has_own_table: Bools, has_table: Bools
    ) -> None:
        """Check Huffman-coded literals: their table, if they have their own, and the lengths of their streams."""
        first = self._frames.bytes_at(at).astype(np.int64)
        table_nbytes = np.where(first < 128, first, first - 126 >> 1) + 1
        at = at + np.where(has_own_table, table_nbytes, 0)
        self._frames.demand(
            numbers,
            (has_own_table | has_table[numbers], "zstd literals repeat a table that is not there"),
            (~has_own_table | (first > 0), "a zstd table of literals is empty"),
            (at < stop, "a zstd table of literals does not fit into its block"),
        )
        has_table[numbers] = True
        if is_one.any():
            one, four = _those(is_one), _those(~is_one)
            self._check_lengths(numbers[one], stop[one], (stop - at)[one], count[one])
            numbers, at, stop, count = numbers[four], at[four], stop[four], count[four]
        jumps = self._frames.words(at)
        nbytes = np.stack([jumps & 0xFFFF, jumps >> 16 & 0xFFFF, jumps >> 32 & 0xFFFF, stop - at - 6])
        nbytes[3] -= nbytes[0] + nbytes[1] + nbytes[2]
        counts = np.empty_like(nbytes)
        counts[:3] = count + 3 >> 2
        counts[3] = count - 3 * counts[0]
        self._frames.demand(numbers, (count >= 6, "zstd literals are too few for four streams"))
        self._check_lengths(numbers, np.cumsum(nbytes, axis=0) + (at + 6), nbytes, counts)

    def _check_lengths(self, numbers: I64, stop: I64, nbytes: I64, count: I64) -> None:
        """Check streams of `count` codes, of shape (blocks,) or (streams, blocks): a code is 1 to 11 bits long."""
        last = self._frames.bytes_at(stop - 1)
        nbits = (nbytes << 3) + (_BIT_LENGTHS[last] - 9)
        holds = (last != 0) & (count <= nbits) & (nbits <= _ZSTD_CODE_NBITS * count)
        self._frames.demand(
            numbers, (holds if holds.ndim == 1 else holds.all(axis=0), "a stream of zstd literals has an odd length")
        )

    def _check_sequences(self, at: I64, count: I64, has_sequences: Bools) -> tuple[I64, I64]:
        if not self._frames.bytes_at(at).any():
            self._frames.demand(self._numbers, (at + 1 == self._stop, _AFTER_SEQUENCES))
            return count, count
        word = self._frames.words(at)
        first = word & 0xFF
        field_nbytes = np.where(first < 128, 1, np.where(first < 255, 2, 3))
        sequences = np.where(first < 128, first, (first - 128 << 8) + (word >> 8 & 0xFF))
        sequences = np.where(first < 255, sequences, (word >> 8 & 0xFFFF) + 0x7F00)
        modes = word >> 8 * field_nbytes & 0xFF
        at = at + field_nbytes
        none, shortest = sequences == 0, count + 3 * sequences
        self._frames.demand(
            self._numbers,
            (~none | (at == self._stop), _AFTER_SEQUENCES),
            (none | (at + 1 + _TABLES_NBYTES[modes] < self._stop), "zstd sequences do not fit into their block"),
            (none | (modes & 3 == 0), "a reserved bit of zstd sequences is set"),
            (
                none | ~_REPEATS[modes] | has_sequences[self._numbers],
                "zstd sequences repeat a table that is not there",
            ),
            (none | (self._frames.bytes_at(self._stop - 1) > 0), "zstd sequences have no end mark"),
            (shortest <= self._limit, "zstd sequences make more than a block may have"),
        )
        has_sequences[self._numbers] |= ~none
        return shortest, np.where(none, count, self._limit)


# ---- deflate ---------------------------------------------------------------------------------------------------------


def _check_deflate(frames: _Frames) -> None:
    at, left = frames.starts.copy(), frames.lengths.copy()
    live, rounds = frames.numbers, 0
    while live.size:
        rounds += 1
        frames.demand_few_blocks(live, rounds)
        begin, stop = at[live], frames.stops[live]
        word = frames.words(begin)
        is_last, kind = word & 1 == 1, word >> 1 & 3
        is_stored, is_dynamic = kind == 0, kind == 2
        length = word >> 8 & 0xFFFF
        following = np.where(is_stored, begin + 5 + length, begin + 2)
        frames.demand(
            live,
            (following <= stop, "a deflate block does not fit into its stream"),
            (kind != 3, "a deflate block is of the reserved type"),
            (~is_stored | (length ^ (word >> 24 & 0xFFFF) == 0xFFFF), "lengths of a stored deflate block differ"),
            (~is_dynamic | ((word >> 3 & 31 < 30) & (word >> 8 & 31 < 30)), "a deflate block has too many codes"),
        )
        at[live] = following
        left[live] -= np.where(is_stored, length, 0)
        ends = is_stored & is_last
        frames.demand(
            live,
            (left[live] >= 0, "its stored deflate blocks are more than the slice"),
            (~ends | (left[live] == 0), "its stored deflate blocks are less than the slice"),
            (~ends | (following == stop), "there is more after the last deflate block"),
            (left[live] <= (stop - begin) * _DEFLATE_RATIO, "it is too short for the slice"),
        )
        live = live[is_stored & ~is_last & frames.good[live]]
