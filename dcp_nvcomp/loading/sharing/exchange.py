"""Exchanges reads that several ranks want alike, as they were stored: each makes its share, and sends it to the others.

    make      threads make this rank's share, in order and some ahead, and begin to send each read to the others
    arrive    a thread receives what the others make, in order and some ahead
    take      a load thread that wants a read gets its bytes, and checks their CRCs when it decodes them

The order of the reads, and who makes which, is the same on all ranks. The ranks take reads in that order, so the first
one that any of them lacks can always be made, sent and received: none waits for good, though each holds few at a time.

A message begins with its status. A rank that can't read says so, and the next one makes that read for all, at last the
first one again. A rank whose load has failed says that, and so ends the loads of the others; it makes and keeps nothing
more, but takes part, or the others would wait. If a connection breaks there is no such way: all connections are closed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import torch
import torch.distributed as dist

from dcp_nvcomp.calls.ranks import failed_elsewhere
from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.loading.read_plan import Read
from dcp_nvcomp.loading.sharing.peers import Peers
from dcp_nvcomp.loading.sharing.worth import Measured
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)

_UNREAD, _THERE, _FAILED = range(3)
_HEAD_NBYTES: Final = 64  # of a message, before the bytes of its read; the first is its status
_REPLACING_THREADS: Final = 4


class Memory:
    """Buffers of messages, all of one size, that are used again."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._free, self._lock = _HEAD_NBYTES + nbytes, list[torch.Tensor](), threading.Lock()

    def take(self) -> torch.Tensor:
        with self._lock:
            return self._free.pop() if self._free else torch.empty(self._nbytes, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)


class _Message:
    """A read's bytes, in memory that is given back once all its users have released it."""

    def __init__(self, memory: Memory, nbytes: int, room: threading.Semaphore | None, users: int) -> None:
        self._memory, self._room, self._users = memory, room, users
        self._lock = threading.Lock()
        self._buffer = memory.take()
        self.data = self._buffer[: _HEAD_NBYTES + nbytes]

    @property
    def status(self) -> int:
        return int(self.data[0])

    @property
    def payload(self) -> memoryview:
        return self.data.numpy().data[_HEAD_NBYTES:]

    def sent_as(self, status: int) -> torch.Tensor:
        """Return what is sent: where the bytes are not there, no more than that."""
        self.data[0] = status
        return self.data if status == _THERE else self.data[:_HEAD_NBYTES]

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._memory.give_back(self._buffer)
        if self._room is not None:
            self._room.release()


@dataclass(frozen=True)
class _Expected:
    """A read that this rank waits for: from another rank, or, without `work`, from a thread of its own."""

    number: int
    attempt: int
    message: _Message | None
    work: dist.Work | None


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
        memory: for messages as long as the longest read.
        thread_count: how many load threads there are; as many reads are made ahead.
        measured: of the first reads each rank makes all, and measures them; then the ranks decide whether to go on so.
            None exchanges all reads.
        after: an exchange whose reads are taken before.
    """

    def __init__(
        self,
        filesystem: Filesystem,
        reads: Sequence[Read],
        peers: Peers,
        memory: Memory,
        thread_count: int,
        *,
        measured: Measured | None,
        after: Exchange | None,
    ) -> None:
        self._filesystem, self._reads, self._peers, self._memory = filesystem, reads, peers, memory
        self._makers = shares(reads, peers.count)
        self._measured, self._alone = measured, 0 if measured is None else measured.count
        self._is_worthwhile: bool | None = True if measured is None else None
        self._after, self._is_over = after, threading.Event()
        self._changed = threading.Condition()
        self._there: dict[int, _Message | BaseException] = {}  # what waits to be taken
        self._made: dict[tuple[int, int], int] = {}  # status of what this rank has made, by number and attempt
        self._read_error: BaseException | None = None  # why this rank can't read
        self._has_warned = False
        self._failure: BaseException | None = None  # why the load has failed, here or elsewhere
        self.broken: BaseException | None = None  # what broke the exchange itself: the connections are closed
        self._own: SimpleQueue[int | None] = SimpleQueue()
        self._replacing: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._sending: SimpleQueue[tuple[list[dist.Work], _Message] | None] = SimpleQueue()
        self._thread_count = thread_count
        self._ahead, self._window = threading.Semaphore(thread_count), threading.Semaphore(thread_count)
        self._workers = WorkerGroup([])
        self._has_started = False
        self.received_nbytes = 0

    def start(self) -> None:
        """Begin, on the thread that closes it too."""
        self._has_started = True
        try:
            self._start("dcp-arrive", self._arrive_all)
            self._start("dcp-send", self._wait_for_sent)
            for number in range(min(_REPLACING_THREADS, self._thread_count)):
                self._start(f"dcp-replace-{number}", self._make_for_others)
            for number in range(self._thread_count):
                self._start(f"dcp-share-{number}", self._make_own)
        except BaseException as error:
            self._break(error)
            raise

    def _start(self, name: str, work: Callable[[], None]) -> None:
        self._workers.start(name, self._guarded, work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._break(error)

    def give_up(self, failure: BaseException) -> None:
        """Note that the load has failed: nothing more is made or taken, and the other ranks are told."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            left = list(self._there.values())
            self._there.clear()
            self._changed.notify_all()
        for message in left:
            if isinstance(message, _Message):
                message.release()
        if self._measured is not None:
            self._measured.give_up()

    def close(self) -> None:
        """Wait until the other ranks have what this one makes for them.

        Raises:
            BaseException: the exchange itself failed, or the wait was interrupted.
        """
        if not self._has_started:  # other ranks wait for it
            self.start()
        self._workers.run(lambda: None)
        if self.broken is not None:
            raise self.broken

    # --- load threads ------------------------------------------------------------------------------------------------

    def take(self, number: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of a read, once they are there."""
        read = self._reads[number]
        if number < self._alone:
            assert self._measured is not None
            with self._measured.fetching(read.stop - read.start):
                self._filesystem.read_into(read.name, read.start, buffer)
            return
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(number))
            failure = self.broken or self._failure
            if failure is not None:
                raise failure
            message = self._there.pop(number) if self._is_worthwhile else None
        if message is None:
            self._filesystem.read_into(read.name, read.start, buffer)
        elif isinstance(message, BaseException):
            raise message
        else:
            buffer[:] = message.payload
            message.release()

    def _is_decided(self, number: int) -> bool:
        is_failed = self.broken is not None or self._failure is not None
        return is_failed or self._is_worthwhile is False or number in self._there

    def decoded(self, number: int, seconds: float) -> None:
        """Take note of how long it took to decode a read."""
        if number < self._alone:
            assert self._measured is not None
            self._measured.decoded(seconds)

    # --- make --------------------------------------------------------------------------------------------------------

    def _make_own(self) -> None:
        while True:
            self._ahead.acquire()
            number = self._own.get()
            if number is None:
                self._own.put(None)
                return
            self._make(number, 0, self._ahead)

    def _make_for_others(self) -> None:
        while (task := self._replacing.get()) is not None:
            self._make(*task, None)
        self._replacing.put(None)

    def _make(self, number: int, attempt: int, room: threading.Semaphore | None) -> None:
        message = self._message(number, room, users=2)
        status = self._read(number, attempt, message)
        data, tag = message.sent_as(status), self._tag(number, attempt)
        self._sending.put(([self._peers.send(data, to, tag) for to in self._peers.others], message))
        if status == _THERE:
            self._arrived(number, message)
        else:
            message.release()
        with self._changed:
            self._made[number, attempt] = status
            self._changed.notify_all()

    def _message(self, number: int, room: threading.Semaphore | None, users: int = 1) -> _Message:
        read = self._reads[number]
        return _Message(self._memory, read.stop - read.start, room, users)

    def _read(self, number: int, attempt: int, message: _Message) -> int:
        """Make a read; return the status of its message."""
        if self._failure is not None:
            return _FAILED
        if self._read_error is not None and not attempt:  # each attempt may take minutes: others do it at once
            return _UNREAD
        read = self._reads[number]
        try:
            self._filesystem.read_into(read.name, read.start, message.payload)
        except BaseException as error:
            self._read_error = error
            return _UNREAD
        return _THERE

    def _wait_for_sent(self) -> None:
        while (sent := self._sending.get()) is not None:
            works, message = sent
            for work in works:
                self._peers.wait(work)
            message.release()

    def _tag(self, number: int, attempt: int) -> int:
        return number * (self._peers.count + 1) + attempt

    # --- arrive ------------------------------------------------------------------------------------------------------

    def _arrive_all(self) -> None:
        if self._after is not None:  # else what is sent now would wait for ranks that take others first
            self._after._is_over.wait()
        try:
            if self._measured is not None:
                is_worthwhile = self._measured.is_worthwhile()
                with self._changed:
                    self._is_worthwhile = is_worthwhile
                    self._changed.notify_all()
            if self._is_worthwhile:
                self._exchange(range(self._alone, len(self._reads)))
        finally:
            self._is_over.set()
            for queue in (self._own, self._replacing, self._sending):
                queue.put(None)

    def _exchange(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._makers[number] == self._peers.own:
                self._own.put(number)
        upcoming, waiting = deque(numbers), deque[_Expected]()
        while upcoming or waiting:
            while upcoming and (expected := self._expected(upcoming[0], may_wait=not waiting)) is not None:
                upcoming.popleft()
                waiting.append(expected)
            one = waiting.popleft()
            status = self._status_of(one)
            if status == _FAILED:
                self.give_up(failed_elsewhere("load"))
            elif status == _UNREAD and one.attempt < self._peers.count:
                waiting.append(self._next_attempt(one))
                continue
            elif status == _UNREAD:
                assert self._read_error is not None  # all ranks have tried, this one too
                self._arrived(one.number, self._read_error)
            elif one.work is not None:
                assert one.message is not None
                self._received(one, one.message)
                continue
            if one.message is not None:
                one.message.release()

    def _expected(self, number: int, *, may_wait: bool) -> _Expected | None:
        """Begin to wait for a read; return None if there is no room for it yet."""
        if self._makers[number] == self._peers.own:
            return _Expected(number, 0, None, None)
        if not self._window.acquire(blocking=may_wait):
            return None
        return self._receiving(number, 0, self._message(number, self._window))

    def _receiving(self, number: int, attempt: int, message: _Message) -> _Expected:
        maker = (self._makers[number] + attempt) % self._peers.count
        return _Expected(number, attempt, message, self._peers.receive(message.data, maker, self._tag(number, attempt)))

    def _next_attempt(self, one: _Expected) -> _Expected:
        """Have the next rank make a read that a rank could not make."""
        number, attempt = one.number, one.attempt + 1
        if (self._makers[number] + attempt) % self._peers.count == self._peers.own:
            self._replacing.put((number, attempt))
            return _Expected(number, attempt, one.message, None)
        return self._receiving(number, attempt, one.message or self._message(number, None))

    def _status_of(self, one: _Expected) -> int:
        if one.work is not None:
            assert one.message is not None
            self._peers.wait(one.work)
            return one.message.status
        with self._changed:
            key = one.number, one.attempt
            self._changed.wait_for(lambda: key in self._made or self.broken is not None)
            if self.broken is not None:
                raise self.broken
            return self._made.pop(key)

    def _received(self, one: _Expected, message: _Message) -> None:
        self.received_nbytes += len(message.payload)
        if one.attempt and self._read_error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("Other ranks read for this one: %s", self._read_error)
        self._arrived(one.number, message)

    def _arrived(self, number: int, message: _Message | BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._there[number] = message
                self._changed.notify_all()
                return
        if isinstance(message, _Message):
            message.release()

    def _break(self, error: BaseException) -> None:
        """End all threads, here and on the other ranks, after an error that leaves no way to go on."""
        with self._changed:
            self.broken = self.broken or error
            self._changed.notify_all()
        self._peers.abandon()
        self._is_over.set()
        for queue in (self._own, self._replacing, self._sending):
            queue.put(None)
        for _ in range(self._thread_count):
            self._ahead.release()
            self._window.release()
        if self._measured is not None:
            self._measured.give_up()
