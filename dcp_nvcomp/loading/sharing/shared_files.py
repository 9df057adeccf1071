"""What a load job reads from: its files, and for some reads the other ranks that make them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dcp_nvcomp.calls.peers import Peers
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.loading.read_plan import Read
from dcp_nvcomp.loading.sharing.exchange import Exchange
from dcp_nvcomp.loading.sharing.messages import Memory
from dcp_nvcomp.loading.sharing.replicas import Replicas, SharedReads
from dcp_nvcomp.loading.sharing.worth import Measured, first_reads
from dcp_nvcomp.storage.base import Filesystem


class SharedFiles:
    """The files that a load job reads, some of whose reads other ranks make.

    Args:
        filesystem: where this rank reads.
        shared: all reads of the load, in the order in which they are made.
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
        self._of: dict[int, tuple[Exchange, int]] = {}  # by the id of a read
        if replicas is None:
            return
        exchanged = [one for one in shared if len(one.members) > 1]
        lengths = (read.stop - read.start for one in exchanged for read in one.reads)
        memory = Memory(max(lengths, default=0))
        for one in exchanged:
            peers, measured = Peers(replicas.group, one.members, one.kind), None
            if replicas.policy == "auto":
                first = first_reads(len(one.reads), thread_count)
                if first is None:
                    continue
                measured = Measured(first, thread_count, decoder_count, peers)
            after = self._exchanges[-1] if self._exchanges else None
            exchange = Exchange(filesystem, one.reads, peers, memory, thread_count, measured=measured, after=after)
            self._exchanges.append(exchange)
            self._of.update({id(read): (exchange, at) for at, read in enumerate(one.reads)})

    @property
    def received_nbytes(self) -> int:
        """How many bytes of data files came from other ranks."""
        return sum(one.received_nbytes for one in self._exchanges)

    def fetch(self, read: Read, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of a read, once."""
        found = self._of.get(id(read))
        if found is None:
            self._filesystem.read_into(read.name, read.start, buffer)
        else:
            exchange, number = found
            exchange.take(number, buffer)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of a file: what came from another rank, and turned out corrupt, is read by this one."""
        return self._filesystem.read(name, start, stop)

    def decoded(self, read: Read, seconds: float) -> None:
        """Take note of how long it took to decode a read."""
        found = self._of.get(id(read))
        if found is not None:
            exchange, number = found
            exchange.decoded(number, seconds)

    def give_up(self) -> None:
        """Note that the load has failed, at once: a thread that waits for a read may wait for this one."""
        for one in self._exchanges:
            one.give_up(CheckpointError("The load has failed on this rank."))

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Exchange while a load reads, and until the other ranks have what they need."""
        try:
            for one in self._exchanges:
                one.start()
            yield
        except BaseException:
            self.give_up()
            self._close()
            raise
        if (failure := self._close()) is not None:
            raise failure

    def _close(self) -> BaseException | None:
        """Wait for all exchanges; return the first error of any."""
        failures = []
        for one in self._exchanges:
            try:
                one.close()
            except BaseException as error:
                failures.append(error)
            if self._replicas is not None:
                self._replicas.failure = self._replicas.failure or one.broken
        return failures[0] if failures else None
