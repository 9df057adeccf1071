"""S3 requests with a time limit: each returns a response or raises StorageError.

Neither s3fs's nor botocore's own retries know a deadline. So they are told to try once (unless `config_kwargs` has
`retries`), and the one loop that retries is ours (attempts.py).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.attempts import Attempts, Done

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30.0

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


def client_options(config: dict[str, Any]) -> dict[str, Any]:
    """The user's options for botocore's Config, with our defaults for timeouts and retries."""
    ours = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS, "retries": {"total_max_attempts": 1}}
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


class S3Client(Attempts):
    """Sends requests through an s3fs filesystem, and retries what is transient until the deadline."""

    _stays_in_process = True

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
        pauses = {"first_pause_seconds": first_pause_seconds, "longest_pause_seconds": longest_pause_seconds}
        super().__init__(fs.loop, deadline_seconds, redact=redact, **pauses)
        self._fs = fs
        self._creating = dict(creating or {})
        fs.retries = 1  # `perform` retries

    def call(
        self, what: str, where: str, operation: str, *, deadline_seconds: float | None = None, **parameters: Any
    ) -> Done[dict[str, Any]]:
        return self.perform(what, where, lambda: self.send(operation, **parameters), deadline_seconds=deadline_seconds)

    async def send(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """One attempt, for `perform`."""
        if operation in ("put_object", "create_multipart_upload"):
            parameters = {**self._creating, **parameters}
        reply: dict[str, Any] = await self._fs._call_s3(operation, **parameters)
        return reply

    def _is_transient(self, error: Exception) -> bool:
        return _is_transient(error)

    def _is_answer(self, error: Exception) -> bool:
        return answer_of(error) != (0, "")

    def _server(self) -> str:
        return self._fs.endpoint_url or "the server"


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
