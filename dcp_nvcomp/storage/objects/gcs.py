"""One bucket of Google Cloud Storage, through its JSON API, with gcsfs's credentials and connections.

gcsfs would retry, without a deadline, and without telling which requests were sent twice; here each is sent once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import crc32c

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.objects.bucket import (
    CONNECT_SECONDS,
    REQUEST_SECONDS,
    AnswerError,
    Bucket,
    Found,
    NoAnswerError,
    if_there,
)
from dcp_nvcomp.storage.objects.options import Place

TYPE: Final = "application/octet-stream"
_BASE: Final = "/storage/v1/"
_GARBLED: Final = "match calculated"  # what was sent is not what arrived
_WORDS: Final = 300
_PIECE_NBYTES: Final = 256 << 10
_SECRETS: Final = ("token", "refresh_token", "client_secret")
_LISTED: Final = "nextPageToken,prefixes,items(name,size,updated,generation)"
_NO_GENERATION: Final = "0"  # of an object that is not there
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


@dataclass(frozen=True)
class Answer:
    """What the server answered: status, headers by names in any case, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body as an object of JSON."""
        try:
            found = parse_json(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswerError(f"the answer is no object of JSON: {_printable(self.body)}")
        return found

    def words(self) -> str:
        """Return what the server says about its refusal."""
        try:
            return str(parse_json(self.body)["error"]["message"])[:_WORDS]
        except (ValueError, KeyError, TypeError):
            return _printable(self.body)


def _printable(body: bytes) -> str:
    return " ".join(body[:_WORDS].decode("utf-8", "replace").split())


def connect(place: Place) -> Any:
    """Return the gcsfs filesystem with a place's credentials. No request is sent to the storage."""
    try:
        from gcsfs.core import GCSFileSystem
    except ImportError as error:
        raise ConfigurationError("gs:// is not available here: pip install 'dcp-nvcomp[gcs]'.") from error
    return GCSFileSystem(**place.client)


def secrets_of(fs: Any) -> dict[str, str]:
    """Return what of a filesystem's credentials no message may show."""
    values = {name: getattr(fs.credentials.credentials, name, None) for name in _SECRETS}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def checksum_text(checksum: int) -> str:
    """Return a CRC-32C as Google writes it."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


class GcsBucket(Bucket):
    """One bucket, through a gcsfs filesystem's session."""

    def __init__(self, fs: Any, name: str, deadline_seconds: float, redact: Redactor) -> None:
        super().__init__(fs.loop, deadline_seconds, redact=redact)
        self._fs, self._name = fs, name
        self._endpoint = fs.base.removesuffix(_BASE)
        pays = fs.requester_pays
        self._common = {"userProject": pays if isinstance(pays, str) else fs.project} if pays else {}

    def _server(self) -> str:
        return str(self._endpoint)

    def url(self, key: str | None = None, *, upload: bool = False, **parameters: str) -> str:
        """Return the address of the bucket's objects, or of one of them."""
        path = f"b/{quote(self._name, safe='')}/o" + ("" if key is None else f"/{quote(key, safe='')}")
        query = urlencode({**parameters, **self._common}, quote_via=quote)
        return f"{self._endpoint}{'/upload' if upload else ''}{_BASE}{path}?{query}"

    async def send(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        """Send a request once."""
        sent = dict(headers or {})
        if url.startswith(f"{self._endpoint}/"):
            await self._authorize(sent)
        answer = await self._exchange(method, url, sent, body)
        if answer.status < 300 or answer.status in (308, 499):  # of an upload session: go on, cancelled
            return answer
        words = answer.words()
        raise AnswerError(answer.status, f"{answer.status} {words}", garbled=answer.status == 400 and _GARBLED in words)

    async def _exchange(self, method: str, url: str, headers: dict[str, str], body: bytes | None) -> Answer:
        import aiohttp
        from yarl import URL

        await self._fs._set_session()
        limits = aiohttp.ClientTimeout(
            total=self._fs.requests_timeout, sock_connect=CONNECT_SECONDS, sock_read=REQUEST_SECONDS
        )
        length = {"Content-Length": str(len(body))} if body else {}
        request = self._fs.session.request(
            method,
            URL(url, encoded=True),
            headers={**headers, **length},
            data=_once(body) if body else body,
            timeout=limits,
            allow_redirects=False,
        )
        try:
            async with request as reply:
                return Answer(reply.status, reply.headers, await reply.read())
        except aiohttp.ClientResponseError as error:  # its own words have the headers that were sent
            failure = NoAnswerError(f"{type(error).__name__}: {error.message}")
        except (aiohttp.ClientConnectorCertificateError, aiohttp.InvalidURL) as error:
            failure = NoAnswerError(f"{type(error).__name__}: {error}", transient=False)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            failure = NoAnswerError(f"{type(error).__name__}: {error}")
        raise failure  # here, so that what aiohttp raised, and the request in it, is not in its context

    async def _authorize(self, headers: dict[str, str]) -> None:
        """Add the header with the credentials, which gcsfs asks for again when they are about to expire."""
        credentials = self._fs.credentials
        if credentials.credentials is None:  # anonymous
            return
        try:
            try:
                await asyncio.to_thread(credentials.apply, headers)  # it may wait for another server
            except RuntimeError:  # no thread can be started any more: the interpreter waits for a save before it exits
                credentials.apply(headers)
            return
        except Exception as error:
            failure = _of_credentials(error)
        raise failure

    async def head(self, key: str) -> Found | None:
        found = await self.describe(key)
        return None if found is None else _found(found)

    async def describe(self, key: str) -> dict[str, Any] | None:
        """Return all that the server knows of an object; None if there is no such object."""
        answer = await if_there(self.send("GET", self.url(key)), None)
        return None if answer is None else answer.json()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        headers = {"Accept-Encoding": "identity"}
        if stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        answer = await self.send("GET", self.url(key, alt="media"), headers)
        if answer.status != 206:  # all of it
            return answer.body[start:stop]
        told = answer.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(told)
        if match is None or int(match[1]) != start or int(match[2]) + 1 - start != len(answer.body):
            raise NoAnswerError(f"the answer to a range has {len(answer.body)} bytes, but should be {told!r}")
        return answer.body

    async def put(self, key: str, data: bytes) -> None:
        await self._upload(key, data)

    async def put_over(self, key: str, data: bytes, version: str | None) -> None:
        await self._upload(key, data, ifGenerationMatch=_NO_GENERATION if version is None else version)

    async def _upload(self, key: str, data: bytes, **conditions: str) -> None:
        """Write an object, with a checksum: the server refuses what was garbled on its way."""
        checksum, boundary = checksum_text(crc32c.crc32c(data)), uuid.uuid4().hex
        meta = json.dumps({"name": key, "crc32c": checksum})
        body = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{meta}\r\n"
            f"--{boundary}\r\nContent-Type: {TYPE}\r\n\r\n"
        ).encode() + data
        body += f"\r\n--{boundary}--\r\n".encode()
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        url = self.url(upload=True, uploadType="multipart", **conditions)
        await self.send("POST", url, headers, body)

    async def delete(self, key: str) -> None:
        await if_there(self.send("DELETE", self.url(key)), None)

    def list(self, where: str, root: str, *, deep: bool) -> tuple[list[Found], list[str]]:
        asked: dict[str, Any] = {"prefix": f"{root}/" if root else "", "fields": _LISTED}
        if not deep:
            asked["delimiter"] = "/"

        async def attempt() -> dict[str, Any]:
            answer = await if_there(self.send("GET", self.url(**asked)), None)
            return {} if answer is None else answer.json()

        found, folders = list[Found](), list[str]()
        while True:
            page = self.call("list", where, attempt)
            found += map(_found, page.get("items", ()))
            folders += page.get("prefixes", ())
            if not page.get("nextPageToken"):
                return found, folders
            asked["pageToken"] = page["nextPageToken"]


def _found(found: Mapping[str, Any]) -> Found:
    updated = datetime.fromisoformat(found["updated"].replace("Z", "+00:00")).timestamp()
    return Found(found["name"], int(found["size"]), updated, str(found["generation"]))


async def _once(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body that can't be sent twice: aiohttp would repeat a PUT when a connection that it has kept breaks."""
    for start in range(0, len(body), _PIECE_NBYTES):
        yield body[start : start + _PIECE_NBYTES]


def _of_credentials(error: Exception) -> Exception:
    """Return our error for one of google-auth's: Google's servers refuse, or can't be reached."""
    from google.auth.exceptions import TransportError

    links = list(_links(error))
    words = "; ".join(dict.fromkeys(f"{type(link).__name__}: {link}" for link in links))
    if any(isinstance(link, TransportError) or getattr(link, "retryable", False) for link in links):
        return NoAnswerError(f"no credentials: {words}")
    return AnswerError(401, f"401 no credentials: {words}")


def _links(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
