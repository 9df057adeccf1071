"""Files that are kept in this process's memory, where the fast tier can't be written."""

from __future__ import annotations

from collections.abc import Iterable

from dcp_nvcomp.storage.base import OutputStream, too_large, too_short

__all__ = ["InMemory"]


class InMemory:
    """Received files of one step.

    Args:
        path: of the step, for messages.

    Attributes:
        files: by name.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.files: dict[str, bytes | bytearray] = {}

    def location(self, name: str) -> str:
        """Return where a file is from, for messages."""
        return f"{self._path}/{name}"

    def open_output(self, name: str) -> OutputStream:
        """Begin a file."""
        return _Output(self.files, name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are fine."""
        for name in names:
            self.files.pop(name, None)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes `start` to `stop`, or raise TruncatedFileError."""
        self._check(name, start, stop)
        return bytes(memoryview(self.files[name])[start:stop])

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill the whole buffer with the bytes from `start` on, or raise TruncatedFileError."""
        self._check(name, start, start + buffer.nbytes)
        buffer.cast("B")[:] = memoryview(self.files[name])[start : start + buffer.nbytes]

    def read_all(self, name: str, *, limit_nbytes: int) -> bytes:
        """Return a whole file, or raise FormatError if it is larger than the limit."""
        if len(self.files[name]) > limit_nbytes:
            raise too_large(self.location(name), limit_nbytes)
        return bytes(self.files[name])

    def file_nbytes(self, name: str) -> int | None:
        """Return the size of a file, or None if there is no such file."""
        return len(self.files[name]) if name in self.files else None

    def _check(self, name: str, start: int, stop: int) -> None:
        if stop > len(self.files[name]):
            raise too_short(self.location(name), start, stop, len(self.files[name]))


class _Output(OutputStream):
    """A file that is there once it is closed."""

    def __init__(self, files: dict[str, bytes | bytearray], name: str) -> None:
        self._files, self._name, self._data = files, name, bytearray()

    def write(self, data: memoryview | bytes) -> None:
        self._data += data

    def close(self) -> None:
        self._files[self._name] = self._data

    def abort(self) -> None:
        self._data = bytearray()
