"""The background process, and what training and it send each other, by pickle over a socket.

training -> background     WriteTask, each followed by the descriptor of its memory; Hurry
background -> training     Ready at the beginning; Progress, Encoded, and at the end WrittenFiles, Failed or CannotRun

main thread      takes messages; ends with the process that started it, whatever it is doing then
a thread a task  encodes and writes; a task that fails removes its files and says why
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.saving.asynchronous.shared_memory import Place, SharedSegment, resolver
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.job import BackgroundThrottle
from dcp_nvcomp.saving.rank_save import RankSave
from dcp_nvcomp.saving.stats import RankTotals
from dcp_nvcomp.storage.processes import StorageSettings
from dcp_nvcomp.version import VERSION

_PROGRESS_SECONDS = 0.2
_LOOKS_SECONDS = 1.0
# Variables that the process has values of its own for.
OWN_ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "",  # it must not take memory there
    "OMP_NUM_THREADS": "1",  # its threads are its own
}


def own_package() -> str:
    """Return version and place of this package: both processes must have the same."""
    return f"{VERSION} at {os.path.realpath(__file__)}"


class WriteTask(NamedTuple):
    """A rank's part of a save. All messages about it carry its number."""

    number: int
    part: bytes  # a pickled `RankSave`: it may hold classes that only training knows
    storage: bytes  # pickled `StorageSettings`
    segment_nbytes: int
    places: Sequence[Place]
    within_seconds: float | None
    environment: dict[str, str]  # as it is now: credentials in it may have been renewed


class Hurry(NamedTuple):
    """The task has to give way no longer."""

    number: int


class Ready(NamedTuple):
    package: str  # `own_package()` there


class Progress(NamedTuple):
    number: int
    nbytes: int  # written since the last such message


class Encoded(NamedTuple):
    """The data in the segment is not needed any more."""

    number: int


class WrittenFiles(NamedTuple):
    """All files are written: each with position in the plan, size and record of its items, in three columns.

    As arrays: training's process would hold the GIL while it unpickles a tuple for each of a million items.
    """

    number: int
    files: Sequence[tuple[DataFileRef, array[int], array[int], array[int]]]
    totals: RankTotals


class Failed(NamedTuple):
    """The task failed and has removed its files."""

    number: int
    error: BaseException


class CannotRun(NamedTuple):
    """The task was not begun: the process lacks something that training has."""

    number: int
    reason: str


Answer = Progress | Encoded | WrittenFiles | Failed | CannotRun


class _TrainingIsGone(ConnectionError):
    """Training's process has ended; other connections may break too, of a codec chooser that asks a service, say."""


class Child:
    def __init__(self, connection: Connection, descriptors: socket.socket) -> None:
        self._connection, self._descriptors = connection, descriptors
        self._sending = threading.Lock()
        self._throttles: dict[int, BackgroundThrottle] = {}
        self._choices = RememberedChoices()

    def serve(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._take(self._connection.recv())

    def _take(self, message: WriteTask | Hurry) -> None:
        if isinstance(message, Hurry):
            throttle = self._throttles.get(message.number)
            if throttle is not None:
                throttle.hurry()
            return
        _, (descriptor,), _, _ = socket.recv_fds(self._descriptors, 1, 1)
        segment = SharedSegment(message.segment_nbytes, descriptor)
        self._throttles[message.number] = BackgroundThrottle(message.within_seconds)
        threading.Thread(target=self._run, args=(message, segment), name="dcp-background", daemon=True).start()

    def _send(self, message: Ready | Answer) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except ConnectionError as error:
            raise _TrainingIsGone from error

    def _run(self, task: WriteTask, segment: SharedSegment) -> None:
        try:
            try:
                _take_environment(task.environment)
                settings: StorageSettings = pickle.loads(task.storage)
                settings.apply()
                part: RankSave = pickle.loads(task.part)
            except Exception as error:
                self._send(CannotRun(task.number, f"{type(error).__name__}: {error}"))
                return
            self._send(self._written(task, part, segment))
        except _TrainingIsGone:
            return
        except BaseException as error:
            self._send(Failed(task.number, _picklable(error)))
        finally:
            del self._throttles[task.number]

    def _written(self, task: WriteTask, part: RankSave, segment: SharedSegment) -> WrittenFiles:
        progress = _Progress(lambda nbytes: self._send(Progress(task.number, nbytes)))
        throttle = self._throttles[task.number]
        throttle.begin(sum(place.nbytes for place in task.places))
        files, totals = part.run(
            resolver(part.items, task.places, segment.view),
            engine=EngineChoice("cpu"),
            remembered=self._choices,
            progress=progress.add,
            on_staged=lambda: self._send(Encoded(task.number)),
            throttle=throttle,
        )
        progress.end()
        at = {id(item.index): position for position, item in enumerate(part.items)}
        columns = [
            (
                file.file,
                array("L", [at[id(index)] for index, _, _ in file.items]),
                array("L", [nbytes for _, nbytes, _ in file.items]),
                array("L", [record for _, _, record in file.items]),
            )
            for file in files
        ]
        return WrittenFiles(task.number, columns, totals)


class _Progress:
    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._nbytes = 0
        self._told_seconds = time.monotonic()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            now = time.monotonic()
            if now - self._told_seconds < _PROGRESS_SECONDS:
                return
            self._told_seconds, told, self._nbytes = now, self._nbytes, 0
        self._report(told)

    def end(self) -> None:
        if self._nbytes:
            self._report(self._nbytes)


def _take_environment(variables: dict[str, str]) -> None:
    wanted = {**variables, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **OWN_ENVIRONMENT}
    for name in os.environ.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error


def _watch(parent: int) -> None:
    """End with the parent, also if its children, forked from it, still hold its end of the socket."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_SECONDS)
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Run the process, with the descriptor of its end of the socket, and its parent's process id."""
    descriptor, parent = map(int, arguments)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    descriptors = socket.socket(fileno=descriptor)
    descriptors.setblocking(True)
    connection = Connection(os.dup(descriptor))
    with contextlib.suppress(ConnectionError):
        connection.send(Ready(own_package()))
    Child(connection, descriptors).serve()
    os._exit(0)  # with tasks half done, if training died: they are abandoned
