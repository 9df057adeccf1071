"""One object of Google Cloud Storage, and the requests that are about it."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import crc32c

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.gcs.client import Answer, GcsClient, NoAnswerError, status_of

T = TypeVar("T")

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")
_TYPE: Final = "application/octet-stream"


def checksum_text(checksum: int) -> str:
    """Return a CRC-32C as Google writes it."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


@dataclass(frozen=True)
class GcsObject:
    """An object that need not exist yet.

    `head`, `get` and `put` are one attempt each, for `perform`; the others retry until the deadline.

    Attributes:
        client: sends the requests.
        bucket: its bucket.
        key: its name.
        where: its URL, for messages.
    """

    client: GcsClient
    bucket: str
    key: str
    where: str

    def perform(self, what: str, attempt: Callable[[], Awaitable[T]], **limits: Any) -> T:
        """Retry an attempt as `Attempts.perform` does."""
        return self.client.perform(what, self.where, attempt, **limits).value

    async def head(self) -> dict[str, Any] | None:
        """Return what the server knows of the object; None if there is no such object."""
        try:
            answer = await self.client.send("GET", self.client.url(self.bucket, self.key))
        except Exception as error:
            if status_of(error) == 404:
                return None
            raise
        return answer.json()

    async def get(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the object's bytes from `start` to `stop`, cut off at its end."""
        headers = {"Accept-Encoding": "identity"}
        if stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        answer = await self.client.send("GET", self.client.url(self.bucket, self.key, {"alt": "media"}), headers)
        if answer.status != 206:  # all of it
            return answer.body[start:stop]
        return _checked_range(answer, start)

    async def put(self, data: bytes, **conditions: str) -> dict[str, Any]:
        """Write the object, with a checksum: the server refuses what was garbled on its way."""
        checksum = checksum_text(crc32c.crc32c(data))
        boundary = uuid.uuid4().hex
        meta = json.dumps({"name": self.key, "crc32c": checksum})
        body = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{meta}\r\n"
            f"--{boundary}\r\nContent-Type: {_TYPE}\r\n\r\n"
        ).encode() + data
        body += f"\r\n--{boundary}--\r\n".encode()
        url = self.client.url(self.bucket, parameters={"uploadType": "multipart", **conditions}, upload=True)
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        found = (await self.client.send("POST", url, headers, body)).json()
        self.check_stored(found, len(data), checksum)
        return found

    def check_stored(self, found: dict[str, Any], nbytes: int, checksum: str) -> None:
        """Raise StorageError if the server has not what was sent."""
        if int(found.get("size", nbytes)) != nbytes or found.get("crc32c", checksum) != checksum:
            message = (
                f"The storage has {found.get('size')} bytes with the checksum {found.get('crc32c')}, but was sent "
            )
            raise StorageError(f"{message}{nbytes} bytes with the checksum {checksum}.", path=self.where)

    def look_up(self) -> dict[str, Any] | None:
        """Return what the server knows of the object; None if there is no such object."""
        return self.perform("look up", self.head)

    def remove(self, *, deadline_seconds: float | None = None) -> None:
        """Remove the object, if it exists."""

        async def attempt() -> None:
            try:
                await self.client.send("DELETE", self.client.url(self.bucket, self.key))
            except Exception as error:
                if status_of(error) != 404:
                    raise

        self.perform("remove", attempt, deadline_seconds=deadline_seconds)


def _checked_range(answer: Answer, start: int) -> bytes:
    told = answer.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(told)
    if match is None or int(match[1]) != start or int(match[2]) + 1 - start != len(answer.body):
        raise NoAnswerError(f"the answer to a range has {len(answer.body)} bytes, but should be {told!r}")
    return answer.body
