"""Decides whether an exchange pays: from the first reads, which each rank makes alone, and from a message's time.

With `r` bytes a second from storage, `d` decoded and `x` received from other ranks, and `n` ranks, a byte takes

    alone       max(1 / r, 1 / d)
    exchanged   max(1 / (n r), 1 / d) + (n - 1) / (n x)

seconds. That receiving costs time of its own is true where cores are few, and pessimistic elsewhere.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from dcp_nvcomp.calls.peers import Peers

_FEWEST: Final = 16  # reads; with fewer there is nothing to gain
_PART: Final = 12  # of the reads one in so many is made to measure, at most
_TRIED_NBYTES: Final = 8 << 20  # that each rank receives
_NEVER: Final = (0.0, math.inf)
_GAIN: Final = 0.85  # the most that it may take of the time of a load without it


def first_reads(count: int, thread_count: int) -> int | None:
    """Return how many of `count` reads to measure; None if these are too few for an exchange."""
    return None if count < _FEWEST else min(thread_count, max(count // _PART, 2))


class Measured:
    """What the first reads of a rank took.

    Args:
        count: how many reads are measured.
        thread_count: how many would be made at a time.
        decoder_count: how many are decoded at a time.
        peers: the ranks that decide together.
    """

    def __init__(self, count: int, thread_count: int, decoder_count: int, peers: Peers) -> None:
        self.count, self._thread_count, self._decoder_count, self._peers = count, thread_count, decoder_count, peers
        self._changed = threading.Condition()
        self._nbytes = 0
        self._began = self._ended = self._decode_seconds = 0.0
        self._decoded = 0
        self._gives_up = False

    @contextmanager
    def fetching(self, nbytes: int) -> Iterator[None]:
        """Measure a read of so many bytes."""
        began = time.perf_counter()
        yield
        with self._changed:
            self._began = min(self._began or began, began)
            self._ended = time.perf_counter()
            self._nbytes += nbytes

    def decoded(self, seconds: float) -> None:
        """Add how long a read took to decode."""
        with self._changed:
            self._decoded += 1
            self._decode_seconds += seconds
            self._changed.notify_all()

    def give_up(self) -> None:
        """Measure no more: this rank wants nothing of an exchange."""
        with self._changed:
            self._gives_up = True
            self._changed.notify_all()

    def is_worthwhile(self) -> bool:
        """Wait for the measured reads, and decide; all ranks call it, and get the same answer.

        Raises:
            RankFailedError: a connection broke.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._gives_up or self._decoded == self.count)
            takes_part = not self._gives_up
        # what a message takes need not be known where it would not pay if it took no time
        if not self._is_less(self._seconds_of_a_byte(math.inf) if takes_part else _NEVER):
            return False
        others = len(self._peers.others)
        tried = torch.zeros(_TRIED_NBYTES // others, dtype=torch.uint8)
        began = time.perf_counter()
        self._peers.all_tell(tried)
        received = others * len(tried) / (time.perf_counter() - began)
        return self._is_less(self._seconds_of_a_byte(received))

    def _is_less(self, mine: tuple[float, float]) -> bool:
        """Return whether a byte takes so much less if it is exchanged, on all ranks together."""
        everyones = self._peers.all_tell(torch.tensor(mine, dtype=torch.float64))
        alone, exchanged = torch.stack(everyones).sum(0).tolist()
        return bool(exchanged < _GAIN * alone)

    def _seconds_of_a_byte(self, received: float) -> tuple[float, float]:
        """Return what a byte takes alone, and exchanged."""
        count = self._peers.count
        # fewer reads at a time than there would be: as if more of them were as fast each
        stored = self._nbytes / (self._ended - self._began) * self._thread_count / self.count
        decode_seconds = self._decode_seconds / self._nbytes / self._decoder_count
        alone = max(1 / stored, decode_seconds)
        return alone, max(1 / stored / count, decode_seconds) + (count - 1) / count / received
