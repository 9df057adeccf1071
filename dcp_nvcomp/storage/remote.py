"""Shared by all remote filesystems: keys below a root, exact range reads, parallel removal, uploads in parts."""

from __future__ import annotations

import contextlib
import io
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dcp_nvcomp.errors import CheckpointError, ConfigurationError, StorageError, TruncatedFileError
from dcp_nvcomp.redaction import Redactor, without_secrets
from dcp_nvcomp.storage.base import (
    BESIDE,
    Filesystem,
    OutputStream,
    check_name,
    check_relative_path,
    storage_errors,
    too_large,
    too_short,
)

PARALLEL_READS = 16
_PARALLEL_WRITES = 4
_MIN_PART_NBYTES = 5 << 20  # S3's own limit
_PART_NBYTES = 16 << 20


def part_nbytes(options: Mapping[str, Any]) -> int:
    """Return the part size of uploads to an object store."""
    nbytes = option_nbytes(options, "default_block_size") or _PART_NBYTES
    if nbytes < _MIN_PART_NBYTES:
        raise ConfigurationError(f"default_block_size must be at least {_MIN_PART_NBYTES}, S3's smallest part.")
    return nbytes


def option_nbytes(options: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of some options that is given, a number of bytes; None if none is."""
    name = next((name for name in names if options.get(name)), None)
    if name is None:
        return None
    try:
        return int(options[name])  # from the environment it is text
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"{name}={options[name]!r} must be a number of bytes.") from None


class RemoteFilesystem(Filesystem):
    """Files behind a network: each read is one request, and several at once pay off."""

    parallel_reads = PARALLEL_READS
    read_nbytes = 8 << 20  # a request takes a round trip
    read_copies = 3  # as the client received it, joined, and in the caller's buffer
    file_nbytes_worthwhile = 64 << 20

    def __init__(self, path: str, root: str, part_nbytes: int, options: Mapping[str, Any]) -> None:
        self.path = without_secrets(path)
        self._redact = Redactor(path, options)
        self._root = root.rstrip("/")
        self._part_nbytes = part_nbytes

    def output_streams(self, thread_count: int, memory_budget: int) -> int:
        # a stream waits for one part at a time, however many threads made it, and holds up to five copies of it
        return max(1, min(_PARALLEL_WRITES, memory_budget // (5 * self._part_nbytes)))

    def _key(self, name: str) -> str:
        name = check_name(name, path=self.path)
        if name.startswith(BESIDE) and self._root:
            parent, slash, _ = self._root.rpartition("/")
            return f"{parent}{slash}{name.removeprefix(BESIDE)}"
        return f"{self._root}/{name}" if self._root else check_relative_path(name, path=self.path)

    def _errors(self, what: str, where: str, *, may_be_done: bool = False) -> contextlib.AbstractContextManager[None]:
        return storage_errors(what, where, self._redact, may_be_done=may_be_done)

    @abstractmethod
    def _get(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a non-empty range that begins inside the file, cut off at its end."""

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Remove a file; one that is missing already is fine."""

    def _get_checked(self, name: str, start: int, stop: int) -> bytes:
        data = self._get(name, start, stop)
        if len(data) > stop - start:
            raise StorageError("The storage sent more bytes than the range has.", path=self.location(name))
        return data

    def read(self, name: str, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop
        if start == stop:
            return b""
        data = self._get_checked(name, start, stop)
        if len(data) < stop - start:
            raise too_short(self.location(name), start, stop, start + len(data))
        return data

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        target = buffer.cast("B")
        target[:] = self.read(name, start, start + len(target))

    def read_all(self, name: str, *, limit_nbytes: int) -> bytes:
        # One request, so that the bytes are never mixed from two versions of a file that is being replaced.
        try:
            data = self._get_checked(name, 0, limit_nbytes + 1)
        except TruncatedFileError:  # no byte at all: an empty file has no range
            return b""
        if len(data) > limit_nbytes:
            raise too_large(self.location(name), limit_nbytes)
        return data

    def remove(self, names: Iterable[str]) -> None:
        known = {self._key(name): name for name in names}  # checks all of them before any is removed
        self.map(self._remove, known.values())

    def close(self) -> None:
        pass  # fsspec shares one client among all users of the same options, and closes it when the process ends


logger = logging.getLogger(__name__)


class RemoteOutput(OutputStream):
    """A new object that others see once it is closed."""

    def __init__(self, where: str, *, replaces: bool = False) -> None:
        self._where, self._replaces = where, replaces
        self._state = "open"  # then "broken", "closed" or "aborted"
        self._may_exist = False  # whether there may be an object of ours

    @abstractmethod
    def _accept(self, data: memoryview) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Send the rest, and make the object visible."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove what was sent. Never raises."""

    def write(self, data: memoryview | bytes) -> None:
        assert self._state == "open"
        self._state = "broken"
        self._accept(memoryview(data).cast("B"))
        self._state = "open"

    def close(self) -> None:
        assert self._state == "open"
        self._state = "broken"
        self._finish()
        self._state = "closed"

    def abort(self) -> None:
        if self._state in ("closed", "aborted"):
            return
        self._state = "aborted"
        self._discard()


class PartedOutput(RemoteOutput):
    """An object that is sent in parts of one size."""

    def __init__(self, where: str, part_nbytes: int, *, replaces: bool = False) -> None:
        super().__init__(where, replaces=replaces)
        self._part_nbytes = part_nbytes
        self._part = io.BytesIO()

    @abstractmethod
    def _send_part(self) -> None:
        """Send what was collected, taken with `_take_part`."""

    def _accept(self, data: memoryview) -> None:
        while data:
            taken = data[: self._part_nbytes - self._part.tell()]
            self._part.write(taken)
            data = data[len(taken) :]
            if self._part.tell() == self._part_nbytes:
                self._send_part()

    def _take_part(self) -> bytes:
        body = self._part.getvalue()  # shares the memory of what was collected
        self._part = io.BytesIO()
        return body

    def close(self) -> None:
        super().close()
        self._part = io.BytesIO()

    def abort(self) -> None:
        self._part = io.BytesIO()
        super().abort()

    def _clean_up(self, step: Callable[[], None]) -> None:
        try:
            step()
        except CheckpointError as error:
            logger.warning("Something of the unfinished %s may be left: %s", self._where, error)
