"""Segments of memory that asynchronous saves of a process share: kept from save to save, and counted.

SegmentStores    the free segments, plain and page-locked: only the first save faults them in
StagingBudget    what saves have reserved and staged
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Segment:
    """A piece of memory that tasks of one lane fill.

    Attributes:
        view: the memory.
        position: where free memory begins.
        in_use: number of tasks that take memory of it.
        is_full: True if no task will be added.
    """

    __slots__ = ("in_use", "is_full", "position", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.begin()

    def begin(self) -> None:
        self.position, self.in_use, self.is_full = 0, 0, False


class SegmentStore:
    """Segments of one kind of memory that no save uses. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Segment] = []

    @property
    def nbytes(self) -> int:
        """Size of the segments that are kept."""
        with self._lock:
            return sum(len(segment.view) for segment in self._free)

    def take(self, nbytes: int, allocate: Callable[[int], memoryview]) -> Segment:
        """Return a segment of `nbytes`: the one that was given back last, or one that `allocate` makes.

        Those of another size, made for a state of another size, are let go.
        """
        with self._lock:
            while self._free:
                segment = self._free.pop()
                if len(segment.view) == nbytes:
                    segment.begin()
                    return segment
        return Segment(allocate(nbytes))

    def give_back(self, segment: Segment) -> None:
        """Keep a segment."""
        with self._lock:
            self._free.append(segment)

    def clear(self) -> None:
        """Free all that is kept."""
        with self._lock:
            self._free.clear()


class StagingBudget:
    """What all asynchronous saves of a process have reserved and staged."""

    def __init__(self) -> None:
        self._in_use_nbytes = 0
        self._changed = threading.Condition()

    def reserve(self, nbytes: int, limit_nbytes: int, give_up: Callable[[], bool]) -> bool:
        """Reserve `nbytes` once no more than `limit_nbytes` are in use with them."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_use_nbytes + nbytes <= limit_nbytes or give_up())
            if self._in_use_nbytes + nbytes > limit_nbytes:
                return False
            self._in_use_nbytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Give back what was reserved."""
        with self._changed:
            self._in_use_nbytes -= nbytes
            self._changed.notify_all()


class SegmentStores:
    """What the asynchronous saves of a process share.

    Attributes:
        plain: segments for the CPU engine.
        pinned: page-locked segments for CUDA engines; plain ones if no more could be had.
        budget: what is in use.
    """

    def __init__(self) -> None:
        self.plain, self.pinned, self.budget = SegmentStore(), SegmentStore(), StagingBudget()

    def clear(self) -> None:
        """Free the segments that no save uses."""
        self.plain.clear()
        self.pinned.clear()
