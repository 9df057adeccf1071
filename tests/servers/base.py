"""What every server of the tests has in common: a process of its own on 127.0.0.1, with its data below a directory."""

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

_START_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 5.0
_REPOSITORY: Final = Path(__file__).parents[2]


class Server(ABC):
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

    @abstractmethod
    def place(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return a URL that ends in `name`, where nothing is yet, and the storage options."""

    @abstractmethod
    def remove(self, url: str) -> None:
        """Remove what `place` made for a URL, and all that is in it."""

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
        """Start it, and return when it answers."""
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
        """End it and its children at once, by SIGKILL; its data stay."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it, and its children."""
        self.kill()  # there is nothing that it would have to write

    def freeze(self) -> None:
        """Let it and its children do nothing until `thaw`; the kernel still accepts connections for it."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
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
