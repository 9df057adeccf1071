"""`limited://DIRECTORY`: storage with a limited rate that counts every byte, for this project and DCP's fsspec writer.

It is an fsspec filesystem like any other, so nothing is patched. All streams with the same options share one link, as
all connections of a machine do. `discard=True` keeps nothing: then writing costs no CPU time, as a network card's would
cost none, and what is measured is how well a save overlaps with it. Data files are left as holes of the right size.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["LimitedFileSystem", "Link", "Throttle", "link"]

# What a link may send at once after it was idle: evens out that sleep() comes back late.
_BURST_SECONDS = 0.005


class Throttle:
    """A link: bytes pass one after the other, at its rate, whichever thread sends them.

    Args:
        rate: bytes a second; None means no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.passed_nbytes = 0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Return once these bytes have passed."""
        with self._lock:
            self.passed_nbytes += nbytes
            if self.rate is None:
                return
            now = time.perf_counter()
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + nbytes / self.rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


@dataclass(frozen=True)
class Link:
    """Both directions of a link."""

    reading: Throttle
    writing: Throttle


def link(rate: float | None = None, label: str = "") -> Link:
    """The link that all filesystems with these options share, whatever instances fsspec makes of them.

    Args:
        rate: bytes a second each way; None means no limit.
        label: distinguishes links when bytes are counted.
    """
    return _link(rate, label)


@functools.cache
def _link(rate: float | None, label: str) -> Link:
    return Link(Throttle(rate), Throttle(rate))


class LimitedFileSystem(LocalFileSystem):
    """A local directory at the other end of a link.

    Args:
        rate: of the link.
        label: of the link.
        discard: whether the content of data files is thrown away.
    """

    protocol = "limited"

    def __init__(self, rate: float | None = None, label: str = "", discard: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.link = link(rate, label)
        self.discard = discard

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(os.fspath(path).removeprefix("limited://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.discard and "w" in mode and path.endswith(".distcp"):
            return _LimitedFile(_Hole(path), self.link)  # the commit checks that it is there
        return _LimitedFile(open(path, mode), self.link)


class _Hole:
    """A file that has the size of what was written to it, and nothing of it."""

    def __init__(self, path: str) -> None:
        self._path, self._nbytes = path, 0

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        self._nbytes += nbytes
        return nbytes

    def close(self) -> None:
        with open(self._path, "wb") as file:
            file.truncate(self._nbytes)


class _LimitedFile:
    """A file whose bytes pass through the links. Writes go through without a copy of their own."""

    def __init__(self, file: Any, link: Link) -> None:
        self._file = file
        self._link = link

    def write(self, data: Any) -> int:
        self._link.writing.take(memoryview(data).nbytes)
        written: int = self._file.write(data)
        return written

    def read(self, nbytes: int = -1) -> bytes:
        data: bytes = self._file.read(nbytes)
        self._link.reading.take(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        nbytes: int = self._file.readinto(buffer)
        self._link.reading.take(nbytes)
        return nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _LimitedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


fsspec.register_implementation("limited", "benchmarks.sinks.LimitedFileSystem", clobber=True)
