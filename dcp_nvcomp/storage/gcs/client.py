"""Requests to Google Cloud Storage's JSON API with a time limit: each returns an answer or raises StorageError.

gcsfs finds the credentials and keeps the connections. It would retry too, without a deadline, and without telling which
requests were sent twice; so the requests are sent from here, each once, and repeated by attempts.py.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.attempts import Attempts
from dcp_nvcomp.storage.gcs.options import GcsPlace

_CONNECT_SECONDS: Final = 5.0
_READ_SECONDS: Final = 30.0
_BASE: Final = "/storage/v1/"
_ERRNO: Final = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 410: errno.ENOENT, 412: errno.EEXIST}
_BUSY: Final = 429  # too many requests: this one was certainly not carried out
_FINAL_STATUSES: Final = (501, 505)  # not implemented, unknown HTTP version
_GARBLED: Final = "match calculated"  # what was sent is not what arrived
_WORDS: Final = 300
_PIECE_NBYTES: Final = 256 << 10


class AnswerError(Exception):
    """The server refused a request.

    Attributes:
        errno: what the status means.
        response: the status, where redaction.py keeps it.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status} {words}")
        self.errno = _ERRNO.get(status)
        self.response = status

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed a moment later."""
        status = self.response
        garbled = status == 400 and _GARBLED in str(self)
        return garbled or status in (408, _BUSY) or (status >= 500 and status not in _FINAL_STATUSES)


class NoAnswerError(Exception):
    """There was no answer, or only a part of one."""

    def __init__(self, words: str, *, transient: bool = True) -> None:
        super().__init__(words)
        self.transient = transient


@dataclass(frozen=True)
class Answer:
    """What the server answered.

    Attributes:
        status: 200, say.
        headers: by names in any case.
        body: all of it.
    """

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


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status of the answer that caused an error; 0 if there was none."""
    while error is not None:
        status = getattr(error, "response", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return 0


def connect(place: GcsPlace) -> Any:
    """Return the gcsfs filesystem with a place's credentials. No request is sent to the storage."""
    try:
        from gcsfs.core import GCSFileSystem
    except ImportError as error:
        raise ConfigurationError("gs:// is not available here: pip install 'dcp-nvcomp[gcs]'.") from error
    return GCSFileSystem(**place.client)


def secrets_of(fs: Any) -> dict[str, str]:
    """Return what of a filesystem's credentials no message may show."""
    found = fs.credentials.credentials
    names = ("token", "refresh_token", "client_secret")
    values = {name: getattr(found, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, str)}


class GcsClient(Attempts):
    """Sends requests through a gcsfs filesystem's session."""

    def __init__(self, fs: Any, deadline_seconds: float, redact: Redactor) -> None:
        super().__init__(fs.loop, deadline_seconds, redact=redact)
        self._fs = fs
        self._endpoint = fs.base.removesuffix(_BASE)
        pays = fs.requester_pays
        self._common = {"userProject": pays if isinstance(pays, str) else fs.project} if pays else {}

    def url(
        self, bucket: str, key: str | None = None, parameters: Mapping[str, str] | None = None, *, upload: bool = False
    ) -> str:
        """Return the address of a bucket's objects, or of one of them."""
        path = f"b/{quote(bucket, safe='')}/o" + ("" if key is None else f"/{quote(key, safe='')}")
        query = urlencode({**(parameters or {}), **self._common}, quote_via=quote)
        return f"{self._endpoint}{'/upload' if upload else ''}{_BASE}{path}?{query}"

    async def send(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        """Send a request once; one attempt, for `perform`."""
        sent = dict(headers or {})
        if url.startswith(f"{self._endpoint}/"):
            await self._authorize(sent)
        answer = await self._exchange(method, url, sent, body)
        if answer.status < 300 or answer.status in (308, 499):  # of an upload session: go on, cancelled
            return answer
        raise AnswerError(answer.status, _words_of(answer))

    async def _exchange(self, method: str, url: str, headers: dict[str, str], body: bytes | None) -> Answer:
        import aiohttp
        from yarl import URL

        await self._fs._set_session()
        limits = aiohttp.ClientTimeout(
            total=self._fs.requests_timeout, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
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

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, AnswerError | NoAnswerError):
            return error.transient
        return isinstance(error, TimeoutError)

    def _may_be_done(self, error: Exception) -> bool:
        return self._is_transient(error) and status_of(error) != _BUSY

    def is_busy(self, error: Exception) -> bool:
        """True if the server has too much to do, and did not begin with the request."""
        return status_of(error) == _BUSY

    def _is_answer(self, error: Exception) -> bool:
        return isinstance(error, AnswerError)

    def _server(self) -> str:
        return str(self._endpoint)


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
    return AnswerError(401, f"no credentials: {words}")


def _links(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _words_of(answer: Answer) -> str:
    """Return what the server says about its refusal."""
    try:
        return str(parse_json(answer.body)["error"]["message"])[:_WORDS]
    except (ValueError, KeyError, TypeError):
        return _printable(answer.body)


def _printable(body: bytes) -> str:
    return " ".join(body[:_WORDS].decode("utf-8", "replace").split())
