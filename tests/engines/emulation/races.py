"""Run kernels under ThreadSanitizer, in a process of their own: ThreadSanitizer can't be loaded into Python."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence

from .memory import SharedMemory

__all__ = ["KernelError", "RaceError", "Races"]

# Threads are made again and again and never joined; to end at the first race is faster than to look for more.
_TSAN_OPTIONS = "halt_on_error=1 exitcode=66 report_thread_leaks=0"
_RACE_STATUS = 66

_MAX_SECONDS = 120


class KernelError(Exception):
    """A kernel does what CUDA forbids, or does not end."""


class RaceError(KernelError):
    """Two threads access the same memory without order. The message is ThreadSanitizer's report."""


class Races:
    """A process that runs a program of `RacesBuild`.

    Args:
        command: what starts the program.
        memory: all memory that the kernels use.
    """

    def __init__(self, command: Sequence[str], memory: SharedMemory) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # until __exit__
        memory_words = [str(memory.descriptor), str(memory.address), str(memory.nbytes)]
        self._process = subprocess.Popen(
            [*command, *memory_words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=[memory.descriptor],
            env={**os.environ, "TSAN_OPTIONS": _TSAN_OPTIONS},
            text=True,
        )

    def __enter__(self) -> Races:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def launch(self, kernel: str, grid: int, arguments: tuple[int, ...], *, threads: int = 256, seed: int = 0) -> None:
        """Run a kernel.

        Args:
            kernel: its name.
            grid: how many thread blocks.
            arguments: numbers, and addresses in the shared memory.
            threads: how many threads a thread block has.
            seed: the order of thread blocks and threads: 0 forward, 1 backward, any other one shuffled.

        Raises:
            RaceError: there is a race.
            KernelError: threads wait in vain, or the process ended for another reason.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        watchdog = threading.Timer(_MAX_SECONDS, self._process.kill)
        watchdog.start()
        try:
            print(kernel, grid, threads, seed, *arguments, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watchdog.cancel()
        if not answer:
            status = self._process.wait()
            self._errors.seek(0)
            report = self._errors.read()
            if status == _RACE_STATUS and "data race" in report:
                raise RaceError(report)
            raise KernelError(f"{kernel}: the process ended with status {status}\n{report}")
        if answer.strip():
            raise KernelError(answer.strip())
