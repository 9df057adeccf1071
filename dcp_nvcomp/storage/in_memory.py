"""A `Filesystem` in this process's memory: to measure without any storage, and for files that no disk has room for."""

from __future__ import annotations

import time
from collections.abc import Iterable

from dcp_nvcomp.storage.base import (
    FileInfo,
    Filesystem,
    OutputStream,
    RecursiveListing,
    already_published,
    too_large,
    too_short,
)


class MemoryFilesystem(Filesystem):
    """Files of one checkpoint."""

    parallel_reads = 1
    read_nbytes = 4 << 20
    read_copies = 1
    file_nbytes_worthwhile = 64 << 20

    def __init__(self, path: str = "memory of this process", *, keeps: bool = True) -> None:
        self.path, self._keeps = path, keeps
        self._files: dict[str, bytes | bytearray] = {}

    def output_streams(self, thread_count: int, memory_budget: int) -> int:
        return min(2, thread_count)

    def create_directory(self) -> None:
        pass

    def open_output(self, name: str) -> OutputStream:
        return _Output(self._files, name, keeps=self._keeps)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        if not overwrite and name in self._files:
            raise already_published(self.location(name))
        self._files[name] = data

    def read(self, name: str, start: int, stop: int) -> bytes:
        found = bytes(memoryview(self._files[name])[start:stop])
        if len(found) < stop - start:
            raise too_short(self.location(name), start, stop, start + len(found))
        return found

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        target = buffer.cast("B")
        source = memoryview(self._files[name])[start : start + len(target)]
        if len(source) < len(target):
            raise too_short(self.location(name), start, start + len(target), start + len(source))
        target[:] = source

    def read_all(self, name: str, *, limit_nbytes: int) -> bytes:
        if len(self._files[name]) > limit_nbytes:
            raise too_large(self.location(name), limit_nbytes)
        return bytes(self._files[name])

    def file_nbytes(self, name: str) -> int | None:
        return len(self._files[name]) if name in self._files else None

    def list_files(self) -> list[FileInfo]:
        return [FileInfo(name, len(data), None) for name, data in sorted(self._files.items())]

    def list_below(self) -> RecursiveListing:
        return RecursiveListing(self.list_files(), [], {})

    def now_seconds(self) -> float:
        return time.time()

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._files.pop(name, None)

    def close(self) -> None:
        pass


class _Output(OutputStream):
    def __init__(self, files: dict[str, bytes | bytearray], name: str, *, keeps: bool) -> None:
        self._files, self._name, self._keeps = files, name, keeps
        self._data = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        if self._keeps:
            self._data += data

    def close(self) -> None:
        self._files[self._name] = self._data

    def abort(self) -> None:
        self._data = bytearray()
