"""What a load job reads from: its files, and for some reads the other ranks that make them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dcp_nvcomp.loading.read_plan import Read
from dcp_nvcomp.loading.sharing.exchange import Exchange
from dcp_nvcomp.loading.sharing.peers import Peers
from dcp_nvcomp.loading.sharing.replicas import Replicas, SharedReads
from dcp_nvcomp.loading.sharing.worth import first_reads
from dcp_nvcomp.storage.base import Filesystem


class SharedFiles:
    """The files that a load job reads, some of whose reads other ranks make.

    Args:
        filesystem: where this rank reads.
        shared: all reads of the load.
        replicas: the ranks that may share reads.
        thread_count: number of load threads.
        decoder_count: how many of them decode at a time.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        shared: Sequence[SharedReads],
        replicas: Replicas | None,
        thread_count: int,
        decoder_count: int,
    ) -> None:
        self._filesystem, self._replicas = filesystem, replicas
        self._exchanges: list[Exchange] = []
        self._left: dict[tuple[str, int, int], tuple[Exchange, int]] = {}  # reads that were not taken yet
        self._taken: dict[tuple[str, int], tuple[Exchange, int]] = {}
        for number, one in enumerate(shared):
            if replicas is None or len(one.members) < 2:
                continue
            alone = first_reads(len(one.reads), thread_count) if replicas.policy == "auto" else 0
            if alone is None:
                continue
            peers = Peers(replicas.group, one.members, number)
            exchange = Exchange(filesystem, one.reads, peers, thread_count, decoder_count, alone=alone)
            self._exchanges.append(exchange)
            for at, read in enumerate(one.reads):
                self._left[read.name, read.start, read.stop] = exchange, at

    @property
    def received_nbytes(self) -> int:
        """How many bytes of data files came from other ranks."""
        return sum(one.received_nbytes for one in self._exchanges)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill a buffer from a file; what was taken once, and turned out corrupt, is read by this rank itself."""
        found = self._left.pop((name, start, start + len(buffer)), None)
        if found is None:
            self._filesystem.read_into(name, start, buffer)
        else:
            exchange, number = found
            self._taken[name, start] = found
            exchange.take(number, buffer)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of a file."""
        return self._filesystem.read(name, start, stop)

    def decoded(self, read: Read, seconds: float) -> None:
        """Take note of how long it took to decode a read."""
        found = self._taken.pop((read.name, read.start), None)
        if found is not None:
            exchange, number = found
            exchange.decoded(number, seconds)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Exchange while a load reads, and until the other ranks have what they need."""
        failed = True
        try:
            for one in self._exchanges:
                one.start()
            yield
            failed = False
        finally:
            for one in self._exchanges:
                one.close(failed=failed)
                if self._replicas is not None:
                    self._replicas.failure = self._replicas.failure or one.failure
