"""A resumable upload: parts are sent to a session, and the object is there when the last one has arrived.

A part that got no answer may have arrived, whole or in part. Before anything is sent again the server is asked how much
it has, and gets the rest. A session that is never completed is removed by Google after a week; nobody sees any of it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.gcs.client import Answer, NoAnswerError, status_of
from dcp_nvcomp.storage.gcs.object import GcsObject

_RANGE: Final = re.compile(r"bytes=0-(\d+)")
_GONE: Final = (404, 410)


class UploadSession:
    """An upload that has been begun."""

    def __init__(self, target: GcsObject) -> None:
        self._target = target
        self._url = target.perform("begin an upload of", self._begin)
        self._received = 0  # how many bytes the server has
        self._unsure = False  # whether a request had no answer since

    async def _begin(self) -> str:
        client, target = self._target.client, self._target
        url = client.url(target.bucket, parameters={"uploadType": "resumable", "name": target.key}, upload=True)
        answer = await client.send("POST", url, {"X-Upload-Content-Type": "application/octet-stream"}, b"")
        found = answer.headers.get("Location")
        if not found:
            raise NoAnswerError("the server began an upload, but did not say where")
        return found

    def send(self, start: int, part: bytes) -> None:
        """Send the bytes from `start` on, a multiple of 256 KiB."""
        if self._target.perform("write", lambda: self._transfer(start, part, None, {})) is not None:
            raise StorageError("The storage completed an upload that was not at its end.", path=self._target.where)

    def complete(self, start: int, part: bytes, checksum: str) -> None:
        """Send the rest, and wait until the object is there."""
        total = start + len(part)
        headers = {"X-Goog-Hash": f"crc32c={checksum}"}
        try:
            found = self._target.perform("complete", lambda: self._transfer(start, part, total, headers))
        except StorageError as error:
            # a session that is gone: was it completed by an attempt whose answer was lost?
            if status_of(error) not in _GONE or not self._unsure:
                raise
            found = self._target.look_up()
            if found is None or found.get("crc32c") != checksum:
                raise
        assert found is not None
        self._target.check_stored(found, total, checksum)

    def cancel(self, *, deadline_seconds: float) -> None:
        """Forget what was sent."""

        async def attempt() -> None:
            try:
                await self._target.client.send("DELETE", self._url)
            except Exception as error:
                if status_of(error) not in _GONE:
                    raise

        self._target.perform("abort an unfinished upload of", attempt, deadline_seconds=deadline_seconds)

    async def _transfer(
        self, start: int, part: bytes, total: int | None, headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Send what the server does not have of a part; return the object if this completed it."""
        end = start + len(part)
        if self._unsure:
            found = await self._put(f"bytes */{'*' if total is None else total}", b"", headers)
            if found is not None:
                return found
        while self._received < end or total is not None:
            if not start <= self._received <= end:
                message = f"The storage has {self._received} bytes of an upload whose bytes {start} to {end} are next."
                raise StorageError(message, path=self._target.where)
            before, rest = self._received, part[self._received - start :]
            span = f"{before}-{end - 1}" if rest else "*"
            found = await self._put(f"bytes {span}/{'*' if total is None else total}", rest, headers)
            if found is not None:
                return found
            if self._received <= before:
                raise NoAnswerError("the server took nothing of what it was sent")
        return None

    async def _put(self, content_range: str, body: bytes, headers: dict[str, str]) -> dict[str, Any] | None:
        """Send one request to the session; return the object if it is complete, else note how much there is of it."""
        self._unsure = True
        answer = await self._target.client.send("PUT", self._url, {**headers, "Content-Range": content_range}, body)
        found = None if answer.status == 308 else answer.json()
        if found is None:
            self._received = _received(answer)
        self._unsure = False
        return found


def _received(answer: Answer) -> int:
    match = _RANGE.fullmatch(answer.headers.get("Range", ""))
    return int(match[1]) + 1 if match else 0
