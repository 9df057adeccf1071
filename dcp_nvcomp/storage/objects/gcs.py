"""One bucket of Google Cloud Storage, through its JSON API, with gcsfs's credentials, connections and options.

gcsfs would retry, without a deadline, and without telling which requests were sent twice; here each is sent once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import crc32c
import fsspec.config

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.calls.suggestions import refuse_unknown
from dcp_nvcomp.errors import ConfigurationError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.objects.bucket import (
    CONNECT_SECONDS,
    REQUEST_SECONDS,
    AnswerError,
    Bucket,
    Found,
    NoAnswerError,
    ObjectFilesystem,
    Place,
    if_there,
    status_of,
)
from dcp_nvcomp.storage.remote import PartedOutput, option_nbytes

GCS: Final = ("gs", "gcs")
_PART_MULTIPLE: Final = 256 << 10  # all parts of an upload but the last are multiples of it
_PART_NBYTES: Final = 16 << 20
_CLIENT: Final = (
    *("project", "access", "token", "requester_pays", "endpoint_url", "session_kwargs", "requests_timeout"),
    *("consistency", "cache_timeout", "timeout", "default_location", "version_aware", "skip_instance_cache"),
    *("use_listings_cache", "listings_expiry_time", "max_paths"),
)
_PART: Final = ("default_block_size", "block_size")
_GCS_URL: Final = re.compile(r"[A-Za-z]+://(?P<bucket>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL)

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
        try:
            found = parse_json(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswerError(f"the answer is no object of JSON: {_printable(self.body)}")
        return found

    def words(self) -> str:
        try:
            return str(parse_json(self.body)["error"]["message"])[:_WORDS]
        except (ValueError, KeyError, TypeError):
            return _printable(self.body)


def _printable(body: bytes) -> str:
    return " ".join(body[:_WORDS].decode("utf-8", "replace").split())


def open_gcs(
    path: str, options: Mapping[str, Any], deadline_seconds: float, known_options: Sequence[str]
) -> ObjectFilesystem:
    """Open a URL of Google Cloud Storage; no request is sent to the storage."""
    place = gcs_place(path, options, known_options)
    try:
        from gcsfs.core import GCSFileSystem
    except ImportError as error:
        raise ConfigurationError("gs:// is not available here: pip install 'dcp-nvcomp[gcs]'.") from error
    fs = GCSFileSystem(**place.client)
    secrets = {name: getattr(fs.credentials.credentials, name, None) for name in _SECRETS}
    hidden = {name: value for name, value in secrets.items() if isinstance(value, str)}
    bucket = GcsBucket(fs, place.bucket, deadline_seconds, Redactor(path, {**place.client, "credentials": hidden}))
    return ObjectFilesystem(path, place.prefix, place.part_nbytes, bucket, GcsOutput)


def gcs_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> Place:
    """Return where a URL leads."""
    options = {**fsspec.config.conf.get("gcs", {}), **fsspec.config.conf.get("gs", {}), **options}
    refuse_unknown(options, (*_CLIENT, *_PART), known_options, "gs://")
    match = _GCS_URL.fullmatch(path)
    if match is None:
        raise ConfigurationError("A URL of Google Cloud Storage is gs://bucket/path.", path=path)
    nbytes = option_nbytes(options, *_PART) or _PART_NBYTES
    if nbytes < _PART_MULTIPLE:
        raise ConfigurationError(f"default_block_size must be at least {_PART_MULTIPLE}, Google's smallest part.")
    client = {name: value for name, value in options.items() if name in _CLIENT}
    _check_client(client)
    return Place(match["bucket"], (match["prefix"] or "").strip("/"), nbytes - nbytes % _PART_MULTIPLE, client)


def _check_client(options: Mapping[str, Any]) -> None:
    """Refuse what gcsfs would take for something else, and find out by asking Google."""
    endpoint, token = options.get("endpoint_url"), options.get("token")
    if endpoint and not str(endpoint).startswith(("http://", "https://")):
        raise ConfigurationError("endpoint_url= must begin with http:// or https://.")
    if isinstance(token, str) and token.endswith(".json") and not os.path.exists(token):
        raise ConfigurationError("token= is the name of a JSON file, but there is no such file. A ~ is not expanded.")


def gcs_url(path: str) -> str:
    """Return one URL for a place however it is written, to compare places."""
    match = _GCS_URL.fullmatch(path)
    return path if match is None else f"gs://{match['bucket']}/{(match['prefix'] or '').strip('/')}".rstrip("/")


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
            self._clean_up(self._abort_upload)
        if self._may_exist and not self._replaces:  # a close that failed may have taken effect nevertheless
            self._clean_up(lambda: self._bucket.remove(self._key, self._where))

    def _abort_upload(self) -> None:
        what, seconds = "abort an unfinished upload of", self._bucket.removal_seconds
        self._bucket.call(what, self._where, self._cancel, deadline_seconds=seconds)

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
