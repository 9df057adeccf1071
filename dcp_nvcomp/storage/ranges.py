"""Pure planning: what is written into which file, and which byte ranges a load fetches. Knows neither IO nor DCP."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ByteRange", "coalesce", "distribute", "file_count"]


def file_count(total_nbytes: int, streams: int, file_nbytes: int) -> int:
    """How many data files a rank writes: one for each stream, none of them tiny.

    Args:
        total_nbytes: bytes that the rank saves.
        streams: how many output streams it may write at once.
        file_nbytes: from what size on a file is worth the opening and the syncing.

    Returns:
        At least 1.
    """
    return max(1, min(streams, total_nbytes // file_nbytes))


def distribute(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Spread items over bins so that these come out about equally large.

    Args:
        sizes: size of each item, in any unit.
        bins: how many bins.

    Returns:
        For each bin the indexes of its items, the largest first; equal sizes keep their order.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    if bins == 1:
        return [order]
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, number) for number in range(bins)]
    for index in order:
        nbytes, number = heapq.heappop(heap)
        filled[number].append(index)
        heapq.heappush(heap, (nbytes + sizes[index], number))
    return filled


@dataclass(frozen=True)
class ByteRange:
    """One read: a half-open range of a file, and which of the wanted pieces lie in it."""

    start: int
    stop: int
    pieces: tuple[int, ...]


def coalesce(pieces: Sequence[tuple[int, int]], gap_nbytes: int, limit_nbytes: int) -> list[ByteRange]:
    """Join pieces of a file into larger reads.

    Args:
        pieces: half-open byte ranges, none inside another.
        gap_nbytes: how many unwanted bytes between two pieces are read along rather than skipped.
        limit_nbytes: how long a read may get; a single longer piece is a read of its own.

    Returns:
        Reads in the order of the file.

    Example:
        >>> coalesce([(0, 10), (12, 20), (100, 110)], gap_nbytes=4, limit_nbytes=1000)
        [ByteRange(start=0, stop=20, pieces=(0, 1)), ByteRange(start=100, stop=110, pieces=(2,))]
    """
    reads: list[ByteRange] = []
    members: list[int] = []
    begin = end = 0
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index]):
        start, stop = pieces[index]
        if members and (start - end > gap_nbytes or stop - begin > limit_nbytes):
            reads.append(ByteRange(begin, end, tuple(members)))
            members = []
        if not members:
            begin = start
        members.append(index)
        end = stop
    if members:
        reads.append(ByteRange(begin, end, tuple(members)))
    return reads
