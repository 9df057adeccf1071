"""Exchanges reads that several ranks want alike, as they were stored: each makes its share, and sends it to the others.

    fetch     threads make this rank's share, in order and some ahead, and begin to send each read to the others
    arrive    a thread receives what the others make, in order and some ahead
    take      a load thread that wants a read gets its bytes, and checks their CRCs when it decodes them

The order of the reads, and who makes which, is the same on all ranks. The ranks take reads in that order, so the first
one that any of them lacks can always be made, sent and received: none waits for good, though each holds few at a time.

A message is the bytes of a read and one more, which is 1 if they are there. A rank that can't read says so with 0, and
the next one makes that read for all. So goes a rank whose load has failed: it makes no more reads, but takes part. If a
connection breaks there is no such way: the load fails on all ranks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Final

import torch
import torch.distributed as dist

from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.errors import RankFailedError, StorageError
from dcp_nvcomp.loading.read_plan import Read
from dcp_nvcomp.loading.sharing.peers import Peers
from dcp_nvcomp.loading.sharing.worth import Measured
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)

_THERE: Final = 1


class _Message:
    """A read's bytes and whether they are there, in memory that is used again once it is not needed any more."""

    def __init__(self, memory: _Memory, nbytes: int, room: threading.Semaphore | None, users: int) -> None:
        self._memory, self._room, self._users = memory, room, users
        self._buffer = memory.take()
        self.data = self._buffer[: nbytes + 1]

    @property
    def bytes(self) -> memoryview:
        return self.data.numpy().data[:-1]

    @property
    def is_there(self) -> bool:
        return int(self.data[-1]) == _THERE

    def release(self) -> None:
        with self._memory.lock:
            self._users -= 1
            if self._users:
                return
            self._memory.free.append(self._buffer)
        if self._room is not None:
            self._room.release()


class _Memory:
    """Buffers of messages, all of one size."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self.free, self.lock = nbytes, list[torch.Tensor](), threading.Lock()

    def take(self) -> torch.Tensor:
        with self.lock:
            return self.free.pop() if self.free else torch.empty(self._nbytes, dtype=torch.uint8)


def shares(reads: Sequence[Read], count: int) -> list[int]:
    """Return who of `count` makes each read: whoever has the fewest bytes so far."""
    nbytes, makers = [0] * count, []
    for read in reads:
        maker = min(range(count), key=nbytes.__getitem__)
        nbytes[maker] += read.stop - read.start
        makers.append(maker)
    return makers


class Exchange:
    """The exchange of some reads by this rank.

    Args:
        filesystem: where this rank makes reads.
        reads: the reads, in the order in which all ranks take them.
        peers: the ranks that take part.
        thread_count: how many load threads there are; as many reads are made ahead.
        decoder_count: how many reads are decoded at a time.
        alone: of how many reads, at the beginning, each rank makes all; then the ranks decide whether to go on so.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        reads: Sequence[Read],
        peers: Peers,
        thread_count: int,
        decoder_count: int,
        *,
        alone: int,
    ) -> None:
        self._filesystem, self._reads, self._peers = filesystem, reads, peers
        self._makers = shares(reads, peers.count)
        self._alone = alone
        self._measured = Measured(alone, thread_count, decoder_count, peers)
        self._is_worthwhile: bool | None = None if alone else True
        self._changed = threading.Condition()
        self._there: dict[int, _Message | BaseException] = {}  # what waits to be taken
        self._made: dict[int, BaseException | None] = {}  # how reads of this rank's share ended
        self._errors: dict[int, BaseException] = {}
        self._gives_up = False
        self._own: SimpleQueue[int | None] = SimpleQueue()
        self._sending: SimpleQueue[tuple[list[dist.Work], _Message] | None] = SimpleQueue()
        self._memory = _Memory(max(read.stop - read.start for read in reads) + 1)
        self._thread_count = thread_count
        self._ahead, self._window = threading.Semaphore(thread_count), threading.Semaphore(thread_count)
        self._workers = WorkerGroup([], self._broken)
        self.received_nbytes = 0
        self.failure: BaseException | None = None  # after which the connections are closed

    def start(self) -> None:
        """Begin, on the thread that closes it too."""
        for number in range(self._thread_count):
            self._workers.start(f"dcp-share-{number}", self._fetch)
        self._workers.start("dcp-send", self._wait_for_sent)
        self._workers.start("dcp-arrive", self._arrive_all)

    def close(self, *, failed: bool) -> None:
        """Wait until the other ranks have what this one makes for them; a rank that failed makes no more of it."""
        if failed:
            with self._changed:
                self._gives_up = True
                left = list(self._there.values())
                self._there.clear()
                self._changed.notify_all()
            for message in left:
                if isinstance(message, _Message):
                    message.release()
            self._measured.give_up()
        try:
            self._workers.run(lambda: None)
        except BaseException:
            if not failed:
                raise self._failure() from None

    # --- load threads ------------------------------------------------------------------------------------------------

    def take(self, number: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of a read, once they are there."""
        read = self._reads[number]
        if number < self._alone:
            with self._measured.fetching(read.stop - read.start):
                self._filesystem.read_into(read.name, read.start, buffer)
            return
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(number))
            if self._workers.error is not None:
                raise self._failure()
            message = self._there.pop(number) if self._is_worthwhile else None
        if message is None:
            self._filesystem.read_into(read.name, read.start, buffer)
        elif isinstance(message, BaseException):
            raise message
        else:
            buffer[:] = message.bytes
            message.release()

    def _is_decided(self, number: int) -> bool:
        return self._workers.error is not None or self._is_worthwhile is False or number in self._there

    def decoded(self, number: int, seconds: float) -> None:
        """Take note of how long it took to decode a read."""
        if number < self._alone:
            self._measured.decoded(seconds)

    def _failure(self) -> BaseException:
        error = self._workers.error
        if not isinstance(error, RuntimeError):
            assert error is not None
            return error
        failure = RankFailedError(f"Another rank is gone, or was waited for too long: {error}")
        failure.in_vain = True
        failure.__cause__ = error
        return failure

    # --- fetch -------------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        while self._workers.error is None:
            self._ahead.acquire()
            number = self._own.get()
            if number is None:
                self._own.put(None)
                self._ahead.release()
                return
            message = self._message(number, self._ahead, users=2)
            error = self._make(number, message)
            self._send(message, number, 0)
            if error is None:
                self._arrived(number, message)
            else:
                message.release()
            with self._changed:
                self._made[number] = error
                self._changed.notify_all()

    def _message(self, number: int, room: threading.Semaphore | None, users: int = 1) -> _Message:
        read = self._reads[number]
        return _Message(self._memory, read.stop - read.start, room, users)

    def _make(self, number: int, message: _Message) -> BaseException | None:
        """Make a read; return what went wrong."""
        read, error = self._reads[number], None
        try:
            if self._gives_up:
                raise StorageError("The load has failed on this rank.")
            self._filesystem.read_into(read.name, read.start, message.bytes)
        except BaseException as failure:
            self._errors[number] = error = failure
        message.data[-1] = _THERE if error is None else 0
        return error

    def _send(self, message: _Message, number: int, attempt: int) -> None:
        tag = self._tag(number, attempt)
        self._sending.put(([self._peers.send(message.data, to, tag) for to in self._peers.others], message))

    def _wait_for_sent(self) -> None:
        while (sent := self._sending.get()) is not None:
            works, message = sent
            for work in works:
                work.wait()
            message.release()

    def _tag(self, number: int, attempt: int) -> int:
        return number * self._peers.count + attempt

    # --- arrive ------------------------------------------------------------------------------------------------------

    def _arrive_all(self) -> None:
        if self._alone:
            is_worthwhile = self._measured.is_worthwhile()
            with self._changed:
                self._is_worthwhile = is_worthwhile
                self._changed.notify_all()
        if self._is_worthwhile:
            numbers = range(self._alone, len(self._reads))
            for number in numbers:
                if self._makers[number] == self._peers.own:
                    self._own.put(number)
            for number, message, work in self._arriving(numbers):
                self._settle(number, message, work)
        self._own.put(None)
        self._sending.put(None)

    def _arriving(self, numbers: Sequence[int]) -> Iterator[tuple[int, _Message | None, dist.Work | None]]:
        """Yield reads in order, each with where and by what it arrives; neither where this rank makes it."""
        posted: deque[tuple[int, _Message | None, dist.Work | None]] = deque()
        upcoming = deque(numbers)
        while posted or upcoming:
            while upcoming:
                number = upcoming[0]
                maker = self._makers[number]
                message = work = None
                if maker != self._peers.own:
                    if not self._window.acquire(blocking=not posted):
                        break
                    message = self._message(number, self._window)
                    work = self._peers.receive(message.data, maker, self._tag(number, 0))
                posted.append((upcoming.popleft(), message, work))
            yield posted.popleft()

    def _settle(self, number: int, message: _Message | None, work: dist.Work | None) -> None:
        if message is None or work is None:
            with self._changed:
                self._changed.wait_for(lambda: number in self._made or self._workers.error is not None)
                if self._workers.error is not None or self._made.pop(number) is None:
                    return
            message = self._message(number, None)
        else:
            work.wait()
            if message.is_there:
                self._received(number, message)
                return
        self._settle_otherwise(number, message)

    def _settle_otherwise(self, number: int, message: _Message) -> None:
        """Have the next rank make a read that a rank could not make, or the one after it."""
        for attempt in range(1, self._peers.count):
            maker = (self._makers[number] + attempt) % self._peers.count
            if maker == self._peers.own:
                made = self._message(number, None, users=2)
                error = self._make(number, made)
                self._send(made, number, attempt)
                if error is None:
                    message.release()
                    self._arrived(number, made)
                    return
                made.release()
            else:
                self._peers.receive(message.data, maker, self._tag(number, attempt)).wait()
                if message.is_there:
                    if number in self._errors and not self._gives_up:
                        logger.warning("Another rank had to read for this one: %s", self._errors[number])
                    self._received(number, message)
                    return
        message.release()
        self._arrived(number, self._errors[number])

    def _received(self, number: int, message: _Message) -> None:
        self.received_nbytes += len(message.data) - 1
        self._arrived(number, message)

    def _arrived(self, number: int, message: _Message | BaseException) -> None:
        with self._changed:
            if not self._gives_up:
                self._there[number] = message
                self._changed.notify_all()
                return
        if isinstance(message, _Message):
            message.release()

    def _broken(self) -> None:
        """End all threads, here and on the other ranks, after an error that leaves no way to go on."""
        self.failure = self.failure or self._failure()
        with self._changed:
            self._changed.notify_all()
        self._peers.abandon()
        self._own.put(None)
        self._sending.put(None)
        for _ in range(self._thread_count):
            self._ahead.release()
            self._window.release()
        self._measured.give_up()
