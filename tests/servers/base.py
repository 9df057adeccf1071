"""Kinds of storage, and what servers of the tests have in common: a process of its own with its data in a directory."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

Location = tuple[str, dict[str, Any]]  # a path or URL, and the storage options

_START_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 5.0
_REPOSITORY: Final = Path(__file__).parents[2]


class Kind(ABC):
    """One kind of storage."""

    @abstractmethod
    def place(self, name: str = "run") -> Location:
        """Return a URL that ends in `name`, where nothing is yet, and the storage options."""

    def remove(self, url: str) -> None:
        """Remove what `place` made for a URL, and all that is in it."""
        return

    def stop(self) -> None:
        """End what was started."""
        return


class Reachable(Kind):
    """A server behind a port on 127.0.0.1, so that a wire can be put before it."""

    port: int

    def through(self, location: Location, port: int) -> Location:
        """Return the same place, to be reached through another port."""

        def rerouted(text: Any) -> Any:
            return text.replace(f"127.0.0.1:{self.port}", f"127.0.0.1:{port}") if isinstance(text, str) else text

        url, options = location
        return rerouted(url), {name: rerouted(value) for name, value in options.items()}


class Served(Reachable):
    """A server that a test may kill; what it has confirmed stays."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    def start(self) -> None:
        """Start it again, where it was."""

    @abstractmethod
    def freeze(self) -> None:
        """Let it answer nothing until `thaw`."""

    @abstractmethod
    def thaw(self) -> None:
        """Let it go on."""


class Server(Served):
    """A server that keeps its port and its data when it is killed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])

    @property
    def user(self) -> str:
        """Who logs in, if anybody does."""
        return getpass.getuser()

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Return what has to be installed; None if nothing has."""

    def _prepare(self) -> None:
        """Write what the server needs; called before each start."""
        return

    @abstractmethod
    def _command(self) -> list[str]:
        """Return how it is started in the foreground."""

    def _ask(self, greeting: bytes = b"") -> None:
        """Raise an OSError unless it answers, with a greeting."""
        with socket.create_connection(("127.0.0.1", self.port), _ANSWER_SECONDS) as connection:
            if greeting and not connection.recv(len(greeting)) == greeting:
                raise ConnectionError("the server hung up")

    def start(self) -> None:
        assert self._process is None
        self._directory.mkdir(parents=True, exist_ok=True)
        self._prepare()
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=_REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self._ask()
                return
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError((self._directory / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self.kill()  # there is nothing that it would have to write

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)  # the kernel still accepts connections for it

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)  # so that it begins no other child meanwhile
        children = [*_descendants(self._process.pid)]
        for pid in [*children, self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while number == signal.SIGKILL and any(_is_alive(pid) for pid in children):
            time.sleep(0.01)  # they may still hold its port


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes that descend from one, each after its own children."""
    for found in Path("/proc").glob("[0-9]*"):
        if _state_and_parent(int(found.name))[1] == pid:
            yield from _descendants(int(found.name))
            yield int(found.name)


def _is_alive(pid: int) -> bool:
    return _state_and_parent(pid)[0] not in "ZX"  # nobody may wait for the orphans of a container


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)
