"""Pure planning: what is written into which file, and which byte ranges a load fetches. Knows neither IO nor DCP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ByteRange:
    """One read: a half-open range of a file, and which of the wanted pieces lie in it."""

    start: int
    stop: int
    pieces: tuple[int, ...]


def coalesce(pieces: Sequence[tuple[int, int]], gap_nbytes: int, limit_nbytes: int) -> list[ByteRange]:
    """Join pieces of a file into larger reads."""
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
