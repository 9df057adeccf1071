"""S3 requests with a time limit: each returns a response or raises StorageError.

The client libraries retry too, but that does not suffice. s3fs gives up after five tries within two seconds. botocore's
waits grow without limit in one mode and end with a bucket of tokens in the other, and neither knows a deadline. Nested
in each other and in a loop of ours they would multiply, and hide which requests were sent more than once. So they are
told to try once (unless `config_kwargs` has `retries`), and the one loop that retries is here.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import completed

__all__ = ["Done", "S3Client", "ShortReplyError", "answer_of", "body_of", "client_options"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30.0
_ATTEMPT_SHARE = 1 / 3  # of the deadline, for one attempt: a silent server leaves time to ask again
_REMOVAL_SECONDS = 10.0  # leftovers do no harm: do not wait for another whole deadline after a failure
_QUIET_SECONDS = 10.0  # after that, retrying is worth a warning

# Transient although their status is 4xx: garbled in transit, too slow, or in conflict with each other.
_TRANSIENT_CODES = (
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "XAmzContentSHA256Mismatch",
)
_FINAL_STATUSES = (501, 505, 507)  # not implemented, unknown HTTP version, storage full


class ShortReplyError(Exception):
    """The body of a reply has fewer bytes than its head says."""


@dataclass(frozen=True)
class Done(Generic[T]):
    """The response to a request, and how often it was sent."""

    value: T
    attempts: int


def client_options(config: dict[str, Any]) -> dict[str, Any]:
    """The user's options for botocore's Config, with our defaults for timeouts and retries."""
    ours = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _READ_SECONDS,
        "retries": {"total_max_attempts": 1},
    }
    return {**ours, **copy.deepcopy(config)}  # botocore changes what it is given


def answer_of(error: BaseException | None) -> tuple[int, str]:
    """Return HTTP status and S3 code of the response that caused an error; 0 and "" if there was none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return 0, ""


def _is_transient(error: Exception) -> bool:
    """True if the same request may succeed a moment later."""
    status, code = answer_of(error)
    if status:
        return (status >= 500 and status not in _FINAL_STATUSES) or status in (408, 429) or code in _TRANSIENT_CODES
    import aiohttp
    from botocore import exceptions as boto  # type: ignore[import-untyped]
    from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

    if isinstance(error, boto.SSLError) and "CERTIFICATE" in str(error):
        return False
    transport = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.FlexibleChecksumError)
    own = (
        aiohttp.ClientError,
        ResponseParserError,
        ShortReplyError,
        ConnectionError,
        TimeoutError,
        asyncio.TimeoutError,
    )
    return isinstance(error, transport + own)


class S3Client:
    """Sends requests through an s3fs filesystem, and retries what is transient until the deadline.

    Args:
        fs: the s3fs filesystem.
        deadline_seconds: how long one operation may take with all its retries.
        creating: further parameters of each request that makes an object.
        first_pause_seconds: the pause after the first failed attempt; each further one is twice as long.
        longest_pause_seconds: no pause is longer than this.
        redact: hides secrets in what the client says.
    """

    def __init__(
        self,
        fs: Any,
        deadline_seconds: float,
        creating: Mapping[str, Any] | None = None,
        *,
        first_pause_seconds: float = 0.1,
        longest_pause_seconds: float = 5.0,
        redact: Redactor,
    ) -> None:
        self._fs = fs
        self._redact = redact
        self._creating = dict(creating or {})
        self._first_pause_seconds = first_pause_seconds
        self._longest_pause_seconds = longest_pause_seconds
        fs.retries = 1  # `perform` retries
        self.deadline_seconds = deadline_seconds
        self.removal_seconds = min(_REMOVAL_SECONDS, deadline_seconds)

    def call(
        self, what: str, where: str, operation: str, *, deadline_seconds: float | None = None, **parameters: Any
    ) -> Done[dict[str, Any]]:
        """Send one request of S3's API.

        Args:
            what: what it does, for messages: "write".
            where: the object, for messages.
            operation: as botocore calls it: "put_object".
            deadline_seconds: instead of the client's.
            **parameters: the operation's.

        Raises:
            StorageError: refused, or no response in time; `answer_of` returns the server's code.
        """
        return self.perform(what, where, lambda: self.send(operation, **parameters), deadline_seconds=deadline_seconds)

    async def send(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """One attempt, for `perform`."""
        if operation in ("put_object", "create_multipart_upload"):
            parameters = {**self._creating, **parameters}
        reply: dict[str, Any] = await self._fs._call_s3(operation, **parameters)
        return reply

    def perform(
        self, what: str, where: str, attempt: Callable[[], Awaitable[T]], *, deadline_seconds: float | None = None
    ) -> Done[T]:
        """Run attempts until one succeeds, is refused for good, or time is up; a CheckpointError ends it too."""
        seconds = self.deadline_seconds if deadline_seconds is None else deadline_seconds
        future = asyncio.run_coroutine_threadsafe(self._perform(what, where, attempt, seconds), self._fs.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # when the wait was interrupted: the request ends with it
            raise

    async def _perform(self, what: str, where: str, attempt: Callable[[], Awaitable[T]], seconds: float) -> Done[T]:
        began = time.monotonic()
        attempts, may_be_done, warned = 0, False, False
        while True:
            attempts += 1
            try:
                return Done(await self._attempt(attempt, began + seconds, seconds * _ATTEMPT_SHARE), attempts)
            except CheckpointError:
                raise
            except Exception as error:
                took = time.monotonic() - began
                pause = min(self._first_pause_seconds * 2 ** min(attempts - 1, 10), self._longest_pause_seconds)
                pause *= random.uniform(0.5, 1)  # so that ranks do not come back all at once
                transient = _is_transient(error)
                may_be_done |= transient
                if not transient or took + pause >= seconds:
                    raise self._failure(what, where, error, attempts, took, may_be_done) from self._redact.error(error)
                words = self._redact(str(error))
                logger.info("Could not %s %s, trying again: %s", what, where, words)
                if took > _QUIET_SECONDS and not warned:
                    warned = True
                    logger.warning("Still trying to %s %s after %.0f s: %s", what, where, took, words)
            await asyncio.sleep(pause)

    async def _attempt(self, attempt: Callable[[], Awaitable[T]], end: float, longest_seconds: float) -> T:
        limit = max(0.0, min(longest_seconds, end - time.monotonic()))
        try:
            return await asyncio.wait_for(attempt(), limit)
        except asyncio.TimeoutError as error:
            text = f"no answer from {self._fs.endpoint_url or 'the server'} within {limit:.1f} s"
            raise TimeoutError(errno.ETIMEDOUT, text) from error

    def _failure(
        self, what: str, where: str, error: Exception, attempts: int, took: float, may_be_done: bool
    ) -> StorageError:
        tried = f", after {attempts} attempts in {took:.0f} s" if attempts > 1 else ""
        failure = StorageError.from_os_error(what, where, completed(error), tried, redact=self._redact)
        if failure.errno is None and answer_of(error) == (0, ""):
            failure.errno = errno.ETIMEDOUT if may_be_done else None
        failure.attempts = attempts
        failure.outcome_unknown = may_be_done
        return failure


async def body_of(reply: dict[str, Any]) -> bytes:
    """The body of a reply to GET, as long as its head says."""
    try:
        data: bytes = await reply["Body"].read()
    finally:
        reply["Body"].close()
    nbytes = int(reply["ContentLength"])
    if len(data) < nbytes:
        raise ShortReplyError(f"the reply ended after {len(data)} of {nbytes} bytes")
    where = reply.get("ContentRange", "")  # "bytes 0-99/1234"
    first, _, last = where.removeprefix("bytes ").partition("/")[0].partition("-")
    if first.isdigit() and last.isdigit() and len(data) < int(last) + 1 - int(first):
        raise ShortReplyError(f"the reply to a range has {len(data)} bytes, but should be {where}")
    return data
