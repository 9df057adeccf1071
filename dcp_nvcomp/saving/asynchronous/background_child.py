"""The background process. `main` is called with three numbers: two descriptors of sockets, and its parent's process id.

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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.saving.asynchronous import background_messages as messages
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegment, resolver
from dcp_nvcomp.saving.job import Patience
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.saving.rank_save import RankSave
from dcp_nvcomp.storage.processes import StorageSettings

_PROGRESS_SECONDS = 0.2
_LOOKS_SECONDS = 1.0


class Child:
    def __init__(self, connection: Connection, segments: socket.socket) -> None:
        self._messages = connection
        self._sockets = segments
        self._sending = threading.Lock()
        self._segments: dict[int, SharedSegment] = {}
        self._patience: dict[int, Patience] = {}

    def serve(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._take(self._messages.recv())

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.Memory):
            _, (descriptor,), _, _ = socket.recv_fds(self._sockets, 1, 1)
            self._segments[message.number] = SharedSegment(message.nbytes, message.number, descriptor)
        elif isinstance(message, messages.Forget):
            for number in message.numbers:
                self._segments.pop(number, None)
        elif isinstance(message, messages.Hurry):
            patience = self._patience.get(message.number)
            if patience is not None:
                patience.hurry()
        else:
            assert isinstance(message, messages.WriteTask)
            self._patience[message.number] = patience = Patience(message.within_seconds)
            threading.Thread(target=self._run, args=(message, patience), name="dcp-background", daemon=True).start()

    def _send(self, message: messages.Message) -> None:
        with self._sending:
            self._messages.send(message)

    def _run(self, task: messages.WriteTask, patience: Patience) -> None:
        try:
            try:
                _take_environment(task.environment)
                settings: StorageSettings = pickle.loads(task.storage)
                settings.apply()
                part: RankSave = pickle.loads(task.part)
            except Exception as error:
                self._send(messages.CannotRun(task.number, f"{type(error).__name__}: {error}"))
                return
            self._send(self._written(task, part, patience))
        except ConnectionError:  # training is gone
            return
        except BaseException as error:
            self._send(messages.Failed(task.number, _picklable(error)))
        finally:
            del self._patience[task.number]

    def _written(self, task: messages.WriteTask, part: RankSave, patience: Patience) -> messages.WrittenFiles:
        progress = _Progress(lambda nbytes: self._send(messages.Progress(task.number, nbytes)))
        patience.begin(sum(place.nbytes for place in task.places))
        files, totals = part.run(
            resolver(part.items, task.places, self._segments[task.segment].view),
            engine=EngineChoice("cpu"),
            remembered=process_state().choices,
            progress=progress.add,
            on_staged=lambda: self._send(messages.Encoded(task.number)),
            patience=patience,
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
        return messages.WrittenFiles(task.number, columns, totals)


class _Progress:
    def __init__(self, report: Any) -> None:
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
    wanted = {**variables, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **messages.OWN_ENVIRONMENT}
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
    descriptor, segments, parent = map(int, arguments)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    with contextlib.suppress(ConnectionError):
        connection.send(messages.Ready(messages.own_package()))
    Child(connection, socket.socket(fileno=segments)).serve()
    os._exit(0)  # with tasks half done, if training died: they are abandoned
