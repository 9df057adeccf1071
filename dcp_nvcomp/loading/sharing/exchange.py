"""Exchanges reads that several ranks want alike, as they were stored: each makes its share, and sends it to the others.

    make      threads make this rank's share, in order and some ahead, and begin to send each read to the others
    arrive    a thread receives what the others make, in order and some ahead
    take      a load thread that wants a read gets its bytes, and checks their CRCs when it decodes them

The order of the reads, and which rank makes each, is the same on all ranks. The ranks take reads in that order, so the
first one that any of them lacks can always be made, sent and received: none waits for good, though each holds few at a
time.

A message begins with its status. A rank that can't read says so, and the next one makes that read for all, at last the
first one again; it makes more of that rank's reads ahead, as many will follow. A rank whose load has failed says that,
and so ends the loads of the others; it makes and keeps nothing more, but takes part, or the others would wait. If a
connection breaks there is no such way: all connections are closed.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Final

from dcp_nvcomp.calls.peers import Peers, Pending
from dcp_nvcomp.calls.ranks import failed_elsewhere
from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.loading.read_plan import Read
from dcp_nvcomp.loading.sharing.messages import FAILED, THERE, UNREAD, Memory, Message
from dcp_nvcomp.loading.sharing.worth import Measured
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)

_LOOKS_SECONDS: Final = 0.1


# A read that this rank waits for: where and by what it arrives; neither where this rank makes it.
_Expected = tuple[int, Message | None, Pending | None]


def shares(reads: Sequence[Read], count: int) -> list[int]:
    """Return which of `count` ranks makes each read: the one with the fewest bytes so far."""
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
        self._there: dict[int, Message | BaseException] = {}  # what waits to be taken
        self._made: dict[int, int] = {}  # the status of each read of this rank's share
        self._ahead_of: dict[int, Iterator[int]] = {}  # reads of ranks that can't read, which this rank makes for them
        self._made_ahead: dict[int, Future[tuple[Message, int]]] = {}
        self._read_error: BaseException | None = None  # why this rank can't read
        self._has_warned = False
        self._failure: BaseException | None = None  # why the load has failed, here or elsewhere
        self.broken: BaseException | None = None  # what broke the exchange itself: the connections are closed
        self._own: SimpleQueue[int | None] = SimpleQueue()
        self._for_others: SimpleQueue[int | None] = SimpleQueue()
        self._sending: SimpleQueue[tuple[list[Pending], Message] | None] = SimpleQueue()
        self._thread_count = thread_count
        self._ahead, self._window = threading.Semaphore(thread_count), threading.Semaphore(thread_count)
        self._workers = WorkerGroup([])
        self._has_started = False
        self.received_nbytes = 0

    def start(self) -> None:
        """Begin, on the thread that closes it too."""
        self._has_started = True
        try:
            self._workers.start("dcp-arrive", self._guarded, self._arrive_all)
        except BaseException as error:
            self._break(error)
            raise

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
            if isinstance(message, Message):
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
            message = self._message(number, self._ahead, users=2)
            status = self._read(number, message, is_own=True)
            self._send(message, status, number, 0)
            with self._changed:
                self._made[number] = status
                self._changed.notify_all()

    def _make_for_others(self) -> None:
        while (number := self._for_others.get()) is not None:
            message = self._message(number, None, users=2)
            self._made_ahead[number].set_result((message, self._read(number, message, is_own=False)))
        self._for_others.put(None)

    def _send(self, message: Message, status: int, number: int, attempt: int) -> None:
        """Send what was made, and have it taken here."""
        data, tag = message.sent_as(status), self._tag(number, attempt)
        self._sending.put(([self._peers.send(data, to, tag) for to in self._peers.others], message))
        if status == THERE:
            self._arrived(number, message)
        else:
            message.release()

    def _message(self, number: int, room: threading.Semaphore | None, users: int = 1) -> Message:
        read = self._reads[number]
        return Message(self._memory, read.stop - read.start, room, users)

    def _read(self, number: int, message: Message, *, is_own: bool) -> int:
        """Make a read, of this rank's share or for another; return the status of its message."""
        if self._failure is not None:
            return FAILED
        if self._read_error is not None and is_own:  # to try again may take minutes: others do it at once
            return UNREAD
        read = self._reads[number]
        try:
            self._filesystem.read_into(read.name, read.start, message.payload)
        except BaseException as error:
            self._read_error = error
            return UNREAD
        return THERE

    def _wait_for_sent(self) -> None:
        while (sent := self._sending.get()) is not None:
            begun, message = sent
            for pending in begun:
                self._peers.wait(pending)
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
                self._with_others()
            self._peers.settle()
        finally:
            self._is_over.set()

    def _with_others(self) -> None:
        """Exchange reads, with threads that are there as long as that takes."""
        workers = WorkerGroup([self._own, self._for_others, self._sending], self._end_threads)

        def exchange() -> None:
            workers.start("dcp-send", self._guarded, self._wait_for_sent)
            for number in range(self._thread_count):
                workers.start(f"dcp-share-{number}", self._guarded, self._make_own)
                workers.start(f"dcp-replace-{number}", self._guarded, self._make_for_others)
            self._exchange(range(self._alone, len(self._reads)))

        workers.run(exchange)

    def _exchange(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._makers[number] == self._peers.own:
                self._own.put(number)
        # strictly in order, on all ranks: else these could wait for each other
        for number, message, pending in self._expected(numbers):
            status = self._first_status(number, message, pending)
            for attempt in range(1, 1 + self._peers.count):
                if status != UNREAD:
                    break
                message, status = self._next_attempt(number, attempt, message)
            if status == UNREAD:
                assert self._read_error is not None  # all ranks have tried, this one too
                self._arrived(number, self._read_error)
            elif status == FAILED:
                self.give_up(failed_elsewhere("load"))
            if message is None:
                continue
            if status == THERE:
                self.received_nbytes += len(message.payload)
                self._arrived(number, message)
            else:
                message.release()

    def _expected(self, numbers: Sequence[int]) -> Iterator[_Expected]:
        """Yield reads in order, and begin to receive some ahead."""
        upcoming, posted = deque(numbers), deque[_Expected]()
        while upcoming or posted:
            while upcoming:
                number = upcoming[0]
                message = pending = None
                if self._makers[number] != self._peers.own:
                    if not self._window.acquire(blocking=not posted):
                        break
                    message = self._message(number, self._window)
                    pending = self._peers.receive(message.data, self._makers[number], self._tag(number, 0))
                posted.append((upcoming.popleft(), message, pending))
            yield posted.popleft()

    def _first_status(self, number: int, message: Message | None, pending: Pending | None) -> int:
        if message is not None and pending is not None:
            self._peers.wait(pending)
            return message.status
        with self._changed:
            self._changed.wait_for(lambda: number in self._made or self.broken is not None)
            if self.broken is not None:
                raise self.broken
            return self._made.pop(number)

    def _next_attempt(self, number: int, attempt: int, message: Message | None) -> tuple[Message | None, int]:
        """Have the next rank make a read; return where it is unless this rank has made it, and its status."""
        maker = (self._makers[number] + attempt) % self._peers.count
        if maker == self._peers.own:
            made, status = self._replacement(number, attempt)
            self._send(made, status, number, attempt)
            if status == THERE and message is not None:
                message.release()
                return None, status
            return message, status
        message = message or self._message(number, None)
        self._peers.wait(self._peers.receive(message.data, maker, self._tag(number, attempt)))
        if message.status == THERE and self._read_error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("Other ranks read for this one: %s", self._read_error)
        return message, message.status

    def _replacement(self, number: int, attempt: int) -> tuple[Message, int]:
        """Return a read that another rank could not make, and its status; have the next of its reads made ahead."""
        if attempt == 1:
            of = self._makers[number]
            if of not in self._ahead_of:
                later = range(number + 1, len(self._reads))
                self._ahead_of[of] = iter([at for at in later if self._makers[at] == of])
                self._make_ahead(of, self._thread_count)
            else:
                self._make_ahead(of, 1)
            ahead = self._made_ahead.get(number)
            if ahead is not None:
                while not ahead.done() and self.broken is None:
                    wait([ahead], _LOOKS_SECONDS)
                if self.broken is not None:
                    raise self.broken
                del self._made_ahead[number]
                return ahead.result()
        message = self._message(number, None, users=2)
        return message, self._read(number, message, is_own=False)

    def _make_ahead(self, of: int, count: int) -> None:
        for number in itertools.islice(self._ahead_of[of], count):
            self._made_ahead[number] = Future()
            self._for_others.put(number)

    def _arrived(self, number: int, message: Message | BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._there[number] = message
                self._changed.notify_all()
                return
        if isinstance(message, Message):
            message.release()

    def _break(self, error: BaseException) -> None:
        """Note an error that leaves no way to go on, and end all threads, here and on the other ranks."""
        with self._changed:
            self.broken = self.broken or error
            self._changed.notify_all()
        self._end_threads()

    def _end_threads(self) -> None:
        self._is_over.set()
        for queue in (self._own, self._for_others, self._sending):
            queue.put(None)
        for _ in range(self._thread_count):
            self._ahead.release()
            self._window.release()
        if self._measured is not None:
            self._measured.give_up()
        self._peers.abandon()
