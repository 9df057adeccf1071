"""One data file on its way to Google Cloud Storage: a single upload if it is small, else parts of a resumable one.

A part that got no answer may have arrived, whole or in part, so the server is asked how much it has before anything is
sent again. An upload that is never completed is removed by Google after a week, and is not visible before.
"""

from __future__ import annotations

import re
from typing import Any, Final

import crc32c

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.objects.bucket import AnswerError, NoAnswerError, status_of
from dcp_nvcomp.storage.objects.gcs import TYPE, GcsBucket, checksum_text
from dcp_nvcomp.storage.parts import PartedOutput

_RANGE: Final = re.compile(r"bytes=0-(\d+)")
_GONE: Final = (404, 410)


class GcsOutput(PartedOutput):
    """A new object."""

    def __init__(self, bucket: GcsBucket, key: str, where: str, part_nbytes: int, *, replaces: bool) -> None:
        super().__init__(where, part_nbytes, replaces=replaces)
        self._bucket, self._key = bucket, key
        self._nbytes = self._checksum = 0  # of all parts that were taken
        self._session: str | None = None  # the address that parts are sent to
        self._received = 0  # how many bytes the server has
        self._unsure = False  # whether a request had no answer since

    def _send_part(self) -> None:
        if self._session is None:
            self._session = self._bucket.call("begin an upload of", self._where, self._begin)
        start, part = self._counted_part()
        if self._bucket.call("write", self._where, lambda: self._transfer(start, part, None, {})) is not None:
            raise StorageError("The storage completed an upload that was not at its end.", path=self._where)

    def _counted_part(self) -> tuple[int, bytes]:
        start, part = self._nbytes, self._take_part()
        self._nbytes += len(part)
        self._checksum = crc32c.crc32c(part, self._checksum)
        return start, part

    def _finish(self) -> None:
        self._may_exist = True
        start, part = self._counted_part()
        if self._session is None:
            self._bucket.call("write", self._where, lambda: self._bucket.put(self._key, part))
            return
        total, checksum = self._nbytes, checksum_text(self._checksum)
        headers = {"X-Goog-Hash": f"crc32c={checksum}"}
        try:
            stored = self._bucket.call("complete", self._where, lambda: self._transfer(start, part, total, headers))
        except StorageError as error:
            # a session that is gone: was it completed by an attempt whose answer was lost?
            if status_of(error) not in _GONE or not self._unsure:
                raise
            found = self._bucket.call("look up", self._where, lambda: self._bucket.describe(self._key))
            if found is None or found.get("crc32c") != checksum:
                raise
            return
        if stored is None or int(stored.get("size", total)) != total or stored.get("crc32c", checksum) != checksum:
            raise StorageError(
                f"The storage was sent {total} bytes with the checksum {checksum}, but says that it has {stored}.",
                path=self._where,
            )

    def _discard(self) -> None:
        if self._session is not None:
            self._clean_up(lambda: self._end("abort an unfinished upload of", self._cancel))
        if self._may_exist and not self._replaces:  # a close that failed may have taken effect nevertheless
            self._clean_up(lambda: self._end("remove", lambda: self._bucket.delete(self._key)))

    def _end(self, what: str, attempt: Any) -> None:
        self._bucket.call(what, self._where, attempt, deadline_seconds=self._bucket.removal_seconds)

    async def _begin(self) -> str:
        url = self._bucket.url(upload=True, uploadType="resumable", name=self._key)
        answer = await self._bucket.send("POST", url, {"X-Upload-Content-Type": TYPE}, b"")
        found = answer.headers.get("Location")
        if not found:
            raise NoAnswerError("the server began an upload, but did not say where")
        return found

    async def _cancel(self) -> None:
        assert self._session is not None
        try:
            await self._bucket.send("DELETE", self._session)
        except AnswerError as error:
            if status_of(error) not in _GONE:
                raise

    async def _transfer(
        self, start: int, part: bytes, total: int | None, headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Send what the server does not have of a part; return the object if this completed it."""
        end, whole = start + len(part), "*" if total is None else total
        if self._unsure:
            found = await self._put(f"bytes */{whole}", b"", headers)
            if found is not None:
                return found
        while self._received < end or total is not None:
            if not start <= self._received <= end:
                message = f"The storage has {self._received} bytes of an upload whose bytes {start} to {end} are next."
                raise StorageError(message, path=self._where)
            before, rest = self._received, part[self._received - start :]
            span = f"{before}-{end - 1}" if rest else "*"
            found = await self._put(f"bytes {span}/{whole}", rest, headers)
            if found is not None:
                return found
            if self._received <= before:
                raise NoAnswerError("the server took nothing of what it was sent")
        return None

    async def _put(self, content_range: str, body: bytes, headers: dict[str, str]) -> dict[str, Any] | None:
        """Send one request to the session; return the object if it is complete, else note how much there is of it."""
        assert self._session is not None
        self._unsure = True
        answer = await self._bucket.send("PUT", self._session, {**headers, "Content-Range": content_range}, body)
        found = None if answer.status == 308 else answer.json()
        if found is None:
            match = _RANGE.fullmatch(answer.headers.get("Range", ""))
            self._received = int(match[1]) + 1 if match else 0
        self._unsure = False
        return found
