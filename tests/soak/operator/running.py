"""The processes of a job: forked, so that any of them can be stopped and killed at any time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.soak.ranks import FORK


class Running:
    """A job that runs."""

    def __init__(self, where: Path, count: int, target: Callable[[int], None]) -> None:
        where.mkdir(parents=True)
        self.where, self.count = where, count
        self.words: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.killed: set[int] = set()
        self.stopped: set[int] = set()
        self._read = [0] * count
        self._processes = [FORK.Process(target=target, args=(rank,)) for rank in range(count)]
        for process in self._processes:
            process.start()
        self.began_seconds = time.monotonic()

    def poll(self) -> None:
        """Read what was said."""
        for rank in range(self.count):
            path = self.where / f"words-{rank}"
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                file.seek(self._read[rank])
                for line in iter(file.readline, ""):
                    if not line.endswith("\n"):
                        break
                    self.words[rank].append(json.loads(line))
                    self._read[rank] += len(line.encode())

    def alive(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def has_said(self, what: str) -> bool:
        """True if all ranks have said so."""
        return all(any(word["what"] == what for word in words) for words in self.words)

    def all_words(self, *what: str) -> list[dict[str, Any]]:
        """Return what was said by any rank, in the order of time, with the rank."""
        found = [
            {**word, "rank": rank} for rank, words in enumerate(self.words) for word in words if word["what"] in what
        ]
        return sorted(found, key=lambda word: word["at"])

    def send(self, ranks: Sequence[int], number: signal.Signals) -> list[int]:
        """Send a signal to those of the ranks that are alive, and return which."""
        alive = [rank for rank in ranks if rank in self.alive()]
        for rank in alive:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            self.stopped |= set(alive)
        elif number == signal.SIGCONT:
            self.stopped -= set(alive)
        elif number == signal.SIGKILL:
            self.killed |= set(alive)
            self.stopped -= set(alive)
        return alive

    def is_stopped(self, rank: int) -> bool:
        """True if a rank is stopped, by whomever."""
        pid = self._processes[rank].pid
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def end(self) -> None:
        """Wait for processes that end; note who ended by a signal."""
        for rank, process in enumerate(self._processes):
            process.join()
            if process.exitcode is not None and process.exitcode < 0:
                self.killed.add(rank)
        self.poll()

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes."""
        return [process.exitcode for process in self._processes]

    def log(self, rank: int) -> str:
        """Return what a rank printed."""
        path = self.where / f"log-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""


class Side:
    """A process beside a job: a command."""

    def __init__(self, name: str, where: Path, target: Callable[[], None]) -> None:
        self.name, self._where, self._target = name, where, target
        self._process = FORK.Process(target=self._run)
        self._process.start()

    def _run(self) -> None:
        output = os.open(self._where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        self._target()

    def join(self, seconds: float) -> tuple[int | None, str]:
        """Return the exit code, None if it did not end in time, and the output."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        return code, self._where.read_text(errors="replace") if self._where.exists() else ""
