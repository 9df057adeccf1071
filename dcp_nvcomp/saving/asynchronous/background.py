"""The background process, as training sees it: started once, before it is first needed, and dead with training."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeAlias

from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.saving.asynchronous import background_child
from dcp_nvcomp.saving.asynchronous.shared_memory import Place, SharedSegment
from dcp_nvcomp.saving.data_files import WrittenFile
from dcp_nvcomp.saving.rank_save import RankSave, Written
from dcp_nvcomp.storage.processes import storage_of

logger = logging.getLogger(__name__)

# Signals by which a scheduler warns training, or a terminal ends it: what becomes of the save is training's to decide.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# An empty entry of its path is the directory that it is started in, which training need not import from.
_CHILD = """
import sys
sys.path[:] = filter(None, sys.path)
from dcp_nvcomp.saving.asynchronous import background_child
background_child.main(sys.argv[1:])
"""
_END_SECONDS = 5.0

_Answers: TypeAlias = SimpleQueue[background_child.Answer | None]


class BackgroundCannotRun(Exception):
    """The process can't do a task that training can do."""


@dataclass(frozen=True)
class Copy:
    """The copied data of the items of a `RankSave`, in their order."""

    places: Sequence[Place]
    segment: SharedSegment


class BackgroundProcess:
    """A process that encodes and writes. Any thread may call anything."""

    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):  # that would train again
            raise OSError("this Python does not know its own executable, or is a frozen program")
        mine, theirs = socket.socketpair()
        try:
            for end in (mine, theirs):
                end.setblocking(True)  # whatever socket.setdefaulttimeout says
            self._connection = Connection(os.dup(mine.fileno()))
            self._process = _start(theirs.fileno())
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        self._socket = mine  # of the same connection: what is sent, and its end, need no other descriptor
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # another one: what is sent may wait for the process to read
        self._numbers = count()
        self._waiting: dict[int, _Answers] = {}
        self._started = threading.Event()  # or it never will
        self._has_died = False
        self._is_retired = False
        self.start_failure: str | None = None  # why it did not come to work at all
        try:
            threading.Thread(target=self._listen, name="dcp-background", daemon=True).start()
            threading.Thread(target=self._watch, name="dcp-background", daemon=True).start()
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        return not self._has_died and not self._is_retired

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(
        self,
        part: RankSave,
        copy: Copy,
        *,
        within_seconds: float | None,
        begun: Callable[[Callable[[], None]], None],
        encoded: Callable[[], None],
        progress: Callable[[int], None],
    ) -> Written:
        number, answers = next(self._numbers), _Answers()
        with self._lock:
            if not self.is_usable:
                raise BackgroundCannotRun("it has ended")
            self._waiting[number] = answers  # first of all: from now on `retire` waits for it
        try:
            try:
                task = _task(number, part, copy, within_seconds)
            except Exception as error:
                raise BackgroundCannotRun(f"{type(error).__name__}: {error}") from error
            self._started.wait()  # until then it may turn out that it can't, and must have done nothing
            if self.start_failure is not None:
                raise BackgroundCannotRun(self.start_failure)
            self._send(task, copy.segment)
            begun(lambda: self._send(background_child.Hurry(number)))
            return self._follow(answers, part.items, encoded, progress)
        finally:
            with self._lock:
                self._waiting.pop(number, None)
                is_over = self._is_retired and not self._waiting
            if is_over:
                self.close()

    def _follow(
        self,
        answers: _Answers,
        items: Sequence[WriteItem],
        encoded: Callable[[], None],
        progress: Callable[[int], None],
    ) -> Written:
        while (answer := answers.get()) is not None:
            if isinstance(answer, background_child.Progress):
                progress(answer.nbytes)
            elif isinstance(answer, background_child.Encoded):
                encoded()
            elif isinstance(answer, background_child.CannotRun):
                raise BackgroundCannotRun(answer.reason)
            elif isinstance(answer, background_child.Failed):
                raise answer.error
            else:
                assert isinstance(answer, background_child.WrittenFiles)
                files = [
                    WrittenFile(
                        file, [(items[at].index, nbytes, record) for at, nbytes, record in zip(*rows, strict=True)]
                    )
                    for file, *rows in answer.files
                ]
                return files, answer.totals
        raise self._death()

    def _death(self) -> CheckpointError:
        status = self._ended()
        advice = ""
        if status == -signal.SIGKILL:
            advice = " If that was for want of memory, a smaller host_memory_budget needs less."
        return CheckpointError(
            f"The background process {self.pid} of asynchronous saves died (exit status {status}): this save was not "
            f"published, and the next one starts another process.{advice}"
        )

    def _ended(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self._process.returncode

    def _send(
        self, message: background_child.WriteTask | background_child.Hurry, segment: SharedSegment | None = None
    ) -> None:
        with self._sending:
            try:
                self._connection.send(message)
                if segment is not None:
                    socket.send_fds(self._socket, [b"s"], [segment.descriptor])
            except OSError:  # it has died; or it has not, and would wait for the descriptor for ever
                self._hang_up()

    def _listen(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._hear(self._connection.recv())
        except Exception as error:  # what it says can't be read
            logger.error(
                "The background process of asynchronous saves is given up: %s: %s", type(error).__name__, error
            )
            self._hang_up()
        finally:
            if not self._started.is_set() and self.start_failure is None:
                self.start_failure = f"it could not start (exit status {self._ended()})"
            with self._lock:
                self._has_died = True
                waiting = list(self._waiting.values())
            with self._sending:
                self._socket.close()
            self._started.set()
            for answers in waiting:
                answers.put(None)

    def _hear(self, message: Any) -> None:
        if isinstance(message, background_child.Ready):
            if message.package != background_child.own_package():
                self.start_failure = f"it found another installation, {message.package}"
                self._hang_up()
            else:
                self._started.set()
            return
        with self._lock:
            answers = self._waiting.get(message.number)
        if answers is not None:
            answers.put(message)

    def _watch(self) -> None:
        """Notice that it has died, also if a process that was forked meanwhile holds the other end of its sockets."""
        self._process.wait()
        self._hang_up()

    def _hang_up(self) -> None:
        """End the connection, but for what it has said already."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def retire(self) -> None:
        with self._lock:
            self._is_retired = True
            is_over = not self._waiting
        if is_over:
            self.close()

    def close(self) -> None:
        """End it; whatever it is doing fails."""
        self._hang_up()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Forget it, in a forked child whose process it is not."""
        self._process.returncode = 0  # so that it is not waited for, and no warning says that it is still running
        self._connection.close()
        self._socket.close()


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if isinstance(path, str) and path),
        **background_child.OWN_ENVIRONMENT,
    }
    # the parent blocks signals, as it takes a while until it could ignore them itself
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(descriptor), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _task(number: int, part: RankSave, copy: Copy, within_seconds: float | None) -> background_child.WriteTask:
    return background_child.WriteTask(
        number,
        pickle.dumps(part),
        pickle.dumps(storage_of(part.path)),
        copy.segment.nbytes,
        copy.places,
        within_seconds,
        dict(os.environ),
    )
