"""A file that is being written to a filesystem of fsspec's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.spec import AbstractBufferedFile

from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import OutputStream, is_not_found, storage_errors

logger = logging.getLogger(__name__)


class FsspecOutput(OutputStream):
    """An output stream whose file appears when it is closed, if the client can do that."""

    def __init__(
        self,
        fs: Any,
        key: str,
        location: str,
        part_nbytes: int,
        redact: Redactor,
        *,
        replaces: bool = False,
        turn: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self._fs, self._key, self._location, self._redact, self._replaces = fs, key, location, redact, replaces
        self._turn = turn or contextlib.nullcontext()
        self._state = "open"  # then "broken", "closed" or "aborted"
        with self._turn, storage_errors("create", location, redact):
            self._file = fs.open(key, "wb", block_size=part_nbytes)

    def write(self, data: memoryview | bytes) -> None:
        assert self._state == "open"
        with self._broken_unless_done("write"):
            self._file.write(memoryview(data).cast("B"))

    def close(self) -> None:
        assert self._state == "open"
        with self._broken_unless_done("write"):
            self._file.close()
        self._state = "closed"

    @contextlib.contextmanager
    def _broken_unless_done(self, what: str) -> Iterator[None]:
        self._state, before = "broken", self._state
        with self._turn, storage_errors(what, self._location, self._redact):
            yield
        self._state = before

    def abort(self) -> None:
        with self._turn:
            self._abort()

    def _abort(self) -> None:
        if self._state in ("closed", "aborted"):
            return
        may_exist = self._state == "broken"  # a close that failed may have taken effect nevertheless
        self._state = "aborted"
        try:
            if not self._discard():
                if self._replaces:  # closing would put what there is of it in the older one's place
                    self._file.closed = True
                    return
                self._file.close()
                may_exist = True
        except Exception as error:
            words = self._redact(str(error))
            logger.warning("Could not discard %s, an unfinished upload may be left: %s", self._location, words)
        if may_exist and not self._replaces:
            try:
                self._fs.rm_file(self._key)
            except Exception as error:
                if not is_not_found(error):
                    words = self._redact(str(error))
                    logger.warning("Could not remove the unfinished %s: %s", self._location, words)

    def _discard(self) -> bool:
        """Discard what was uploaded so far; return False if this kind of file can't."""
        if not isinstance(self._file, AbstractBufferedFile) or type(self._file).discard is AbstractBufferedFile.discard:
            return False
        self._file.closed = True  # its close() and __del__ would commit the truncated file
        self._file.discard()
        return True

    def __del__(self) -> None:
        # Dropped without close or abort. Commit nothing; and send no requests here: the loop may be closed.
        if getattr(self, "_state", "closed") in ("open", "broken") and isinstance(
            getattr(self, "_file", None), AbstractBufferedFile
        ):
            self._file.closed = True


class Replacement(OutputStream):
    """A file that is written under a temporary name and takes the place of another one when it is complete."""

    def __init__(self, written: OutputStream, take_place: Callable[[], None]) -> None:
        self._written, self._take_place = written, take_place

    def write(self, data: memoryview | bytes) -> None:
        self._written.write(data)

    def close(self) -> None:
        self._written.close()
        self._take_place()

    def abort(self) -> None:
        self._written.abort()
