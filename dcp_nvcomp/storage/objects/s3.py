"""One bucket of S3 or a compatible store, through s3fs's client.

Neither s3fs's nor botocore's own retries know a deadline, so they are told to try once (unless `config_kwargs` has
`retries`). Nor are s3fs's own files used: one that is dropped by an exception is committed.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import functools
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

import fsspec

from dcp_nvcomp.calls.suggestions import unknown_option
from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import RecursiveListing, UnfinishedUpload, already_published
from dcp_nvcomp.storage.conditional import AS_IT_IS, UNREADABLE, publish
from dcp_nvcomp.storage.objects.bucket import (
    CONNECT_SECONDS,
    REQUEST_SECONDS,
    Bucket,
    BucketTarget,
    Found,
    NoAnswerError,
    ObjectFilesystem,
    if_there,
    status_of,
)
from dcp_nvcomp.storage.remote import PARALLEL_READS, PartedOutput, part_nbytes
from dcp_nvcomp.storage.reread import is_stored

_UNKNOWN_CONDITIONS: Final = ("NotImplemented", "InvalidArgument", "InvalidRequest")
# Transient although their status is 4xx: garbled in transit, too slow, or in conflict with each other.
_TRANSIENT_CODES: Final = (
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "XAmzContentSHA256Mismatch",
)
_FINAL_STATUSES: Final = (501, 505, 507)  # not implemented, unknown HTTP version, storage full
_PARTS_BEFORE_GROWTH = 2000  # S3 takes 10,000 parts: with this growth nearly 1 TiB
_NEXT: Final = {
    "ContinuationToken": "NextContinuationToken",
    "KeyMarker": "NextKeyMarker",
    "UploadIdMarker": "NextUploadIdMarker",
}


def open_s3(path: str, options: Mapping[str, Any], deadline_seconds: float) -> S3Filesystem:
    """Open a URL of S3; no request is sent."""
    config = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": REQUEST_SECONDS,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 2 * PARALLEL_READS,  # botocore's 10 would queue our parallel reads
        **copy.deepcopy(options.get("config_kwargs") or {}),  # botocore changes what it is given
    }
    fs, root = fsspec.url_to_fs(path, **{"use_listings_cache": False, **options, "config_kwargs": config})
    fs.connect()  # no request yet, but wrong client options show here
    _check_additional_kwargs(fs)
    _drop_expect_header(fs)
    name, prefix, _ = fs.split_path(root)
    bucket = S3Bucket(fs, name, deadline_seconds, Redactor(path, options))
    grow = not options.get("fixed_upload_size")
    return S3Filesystem(path, prefix, part_nbytes(options), bucket, functools.partial(S3Output, grow=grow))


def _check_additional_kwargs(fs: Any) -> None:
    """s3fs drops silently what no S3 operation takes: a mistyped ServerSideEncryption would store plain data."""
    model = fs.s3.meta.service_model
    operations = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject")
    names = {"acl"}.union(*(model.operation_model(operation).input_shape.members for operation in operations))
    for option in fs.s3_additional_kwargs.keys() - names:
        close = difflib.get_close_matches(option, sorted(names), n=1, cutoff=0.6)
        raise unknown_option(
            option, close or ["ServerSideEncryption"], storage="s3_additional_kwargs, with the parameters of PutObject,"
        )


def _drop_expect_header(fs: Any) -> None:
    """Let uploads time out: while aiohttp waits for "100 Continue", botocore's read_timeout does not run."""
    from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

    fs.s3.meta.events.unregister("before-call.s3", add_expect_header)


def _code_of(error: BaseException | None) -> str:
    """Return S3's code of the response that caused an error; "" if there was none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _refuses_conditions(error: BaseException) -> bool:
    """True if the server's response is that it does not know conditional writes."""
    return status_of(error) in (405, 501) or _code_of(error) in _UNKNOWN_CONDITIONS


class S3Bucket(Bucket):
    """One bucket, through the client of an s3fs filesystem."""

    def __init__(self, fs: Any, name: str, deadline_seconds: float, redact: Redactor) -> None:
        super().__init__(fs.loop, deadline_seconds, redact=redact)
        self._fs, self._name = fs, name
        acl = fs.s3_additional_kwargs.get("acl")  # s3fs sends it with its own files only
        self._creating = {"ACL": acl} if acl else {}
        fs.retries = 1  # `perform` retries

    def _server(self) -> str:
        return self._fs.endpoint_url or "the server"

    def _is_transient(self, error: Exception) -> bool:
        status, code = status_of(error), _code_of(error)
        if status:
            return (status >= 500 and status not in _FINAL_STATUSES) or status in (408, 429) or code in _TRANSIENT_CODES
        import aiohttp
        from botocore import exceptions as boto  # type: ignore[import-untyped]
        from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

        if isinstance(error, boto.SSLError) and "CERTIFICATE" in str(error):
            return False
        transport = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.FlexibleChecksumError)
        own = (aiohttp.ClientError, ResponseParserError, ConnectionError, asyncio.TimeoutError)
        return isinstance(error, transport + own) or super()._is_transient(error)

    def _is_answer(self, error: Exception) -> bool:
        return status_of(error) != 0 or _code_of(error) != ""

    async def send(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Send a request once."""
        if operation in ("put_object", "create_multipart_upload"):
            parameters = {**self._creating, **parameters}
        reply: dict[str, Any] = await self._fs._call_s3(operation, Bucket=self._name, **parameters)
        return reply

    async def head(self, key: str) -> Found | None:
        found = await if_there(self.send("head_object", Key=key), None)
        return None if found is None else _found({**found, "Key": key, "Size": found["ContentLength"]})

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        span = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        return await _body_of(await self.send("get_object", Key=key, **span))

    async def put(self, key: str, data: bytes) -> None:
        await self.send("put_object", Key=key, Body=data)

    async def put_over(self, key: str, data: bytes, version: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        await self.send("put_object", Key=key, Body=data, **condition)

    async def delete(self, key: str) -> None:
        await if_there(self.send("delete_object", Key=key), None)

    def list(self, where: str, root: str, *, deep: bool) -> tuple[list[Found], list[str]]:
        asked = {"Prefix": f"{root}/" if root else "", **({} if deep else {"Delimiter": "/"})}
        found, folders = list[Found](), list[str]()
        for page in self._pages("list", where, "list_objects_v2", asked):
            found += map(_found, page.get("Contents", ()))
            folders += [one["Prefix"] for one in page.get("CommonPrefixes", ())]
        return found, folders

    def uploads(self, where: str, prefix: str, **limits: Any) -> Iterator[dict[str, Any]]:
        """Yield the unfinished multipart uploads of objects whose names begin with a prefix."""
        for page in self._pages(
            "list unfinished uploads of", where, "list_multipart_uploads", {"Prefix": prefix}, **limits
        ):
            yield from page.get("Uploads", ())

    def abort_upload(self, where: str, key: str, upload_id: str, **limits: Any) -> None:
        """Delete the parts of a multipart upload, if it exists."""
        attempt = functools.partial(self._send_if_there, "abort_multipart_upload", Key=key, UploadId=upload_id)
        self.call("abort an unfinished upload of", where, attempt, **limits)

    def _pages(
        self, what: str, where: str, operation: str, asked: Mapping[str, Any], **limits: Any
    ) -> Iterator[dict[str, Any]]:
        tokens: dict[str, Any] = {}
        while True:
            page = self.call(
                what, where, functools.partial(self._send_if_there, operation, **asked, **tokens), **limits
            )
            yield page
            if not page.get("IsTruncated"):
                return
            tokens = {ours: page[theirs] for ours, theirs in _NEXT.items() if page.get(theirs)}

    async def _send_if_there(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await if_there(self.send(operation, **parameters), {})


def _found(found: Mapping[str, Any]) -> Found:
    modified_seconds = found["LastModified"].timestamp() if "LastModified" in found else 0.0
    return Found(found["Key"], int(found["Size"]), modified_seconds, str(found.get("ETag", "")).strip('"'))


async def _body_of(reply: dict[str, Any]) -> bytes:
    """Return the body of a reply to GET, as long as its head says."""
    try:
        data: bytes = await reply["Body"].read()
    finally:
        reply["Body"].close()
    nbytes = int(reply["ContentLength"])
    if len(data) < nbytes:
        raise NoAnswerError(f"the reply ended after {len(data)} of {nbytes} bytes")
    where = reply.get("ContentRange", "")  # "bytes 0-99/1234"
    first, _, last = where.removeprefix("bytes ").partition("/")[0].partition("-")
    if first.isdigit() and last.isdigit() and len(data) < int(last) + 1 - int(first):
        raise NoAnswerError(f"the reply to a range has {len(data)} bytes, but should be {where}")
    return data


class S3Target(BucketTarget):
    """An object as conditional.py publishes it, by If-Match or If-None-Match."""

    forms = (AS_IT_IS, '"{}"', None)  # Ceph wants an ETag bare and the standard quoted

    async def version(self) -> str | None:
        try:
            return await super().version()
        except Exception as error:
            if status_of(error) == 403:
                return UNREADABLE
            raise

    async def read(self) -> bytes | None:
        try:
            return await super().read()
        except Exception as error:
            if status_of(error) == 403:
                return None
            raise

    async def write(self, data: bytes, before: str | None, form: str | None) -> None:
        if form is None or before == UNREADABLE:
            await self._bucket.put(self._key, data)
        else:
            await self._bucket.put_over(self._key, data, None if before is None else form.format(before))

    def is_refusal(self, error: Exception) -> bool:
        return status_of(error) == 412 or _code_of(error) == "NoSuchKey"

    def knows_no_conditions(self, error: Exception) -> bool:
        return _refuses_conditions(error)


class S3Filesystem(ObjectFilesystem):
    """A checkpoint's directory on S3 or a compatible store."""

    _bucket: S3Bucket
    _witness: tuple[str, bytes] | None = None  # what this object published last: it is certainly there

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        if overwrite:
            publish(self._bucket, self._target(name), data, overwrite=True)
            self._witness = (name, data)
        else:
            self._create(name, data)

    def _target(self, name: str) -> S3Target:
        return S3Target(self._bucket, self._key(name), self.location(name))

    def _create(self, name: str, data: bytes) -> None:
        """PUT if there is nothing. Where the server does not see to that itself, look before and after."""
        honoured = self._honours_conditions()
        if honoured is not True and self.file_nbytes(name) is not None:
            raise already_published(self.location(name))
        created = honoured is not False and self._put_if_none(name, data)
        if created and honoured:
            return
        if not created:
            warnings.warn(
                f"{self.path}: this S3 server does not know If-None-Match. overwrite=False looks for another "
                "checkpoint before and after it publishes, but two saves of the same moment may both succeed.",
                RuntimeWarning,
                stacklevel=2,
            )
            publish(self._bucket, self._target(name), data, overwrite=True)
        if not self._is_there(name, data):
            raise already_published(self.location(name))

    def _put_if_none(self, name: str, data: bytes) -> bool:
        """Return False if the server refuses conditions."""
        try:
            publish(self._bucket, self._target(name), data, overwrite=False)
        except StorageError as error:
            if _refuses_conditions(error):
                return False
            raise
        return True

    def _honours_conditions(self) -> bool | None:
        """Return whether the server keeps an existing object when a PUT asks for that; None if that can't be tried."""
        if self._witness is None:
            return None
        name, data = self._witness
        try:
            self._bucket.call("write", self.location(name), lambda: self._bucket.put_over(self._key(name), data, None))
        except StorageError as error:
            if status_of(error) == 412:
                return True
            if not _refuses_conditions(error):
                raise
        return False

    def _is_there(self, name: str, data: bytes) -> bool:
        return is_stored(lambda: self._get_checked(name, 0, len(data) + 1), data)

    def list_uploads(self) -> list[UnfinishedUpload]:
        prefix = self._prefix
        return [
            UnfinishedUpload(name, upload["UploadId"], upload["Initiated"].timestamp())
            for upload in self._bucket.uploads(self.path, prefix)
            if upload["Key"].startswith(prefix) and (name := self._name(upload["Key"])) and "/" not in name
        ]

    def list_below(self) -> RecursiveListing:
        files = super().list_below().files
        uploads: list[str] = []
        try:
            uploads += [self._name(upload["Key"]) for upload in self._bucket.uploads(self.path, self._prefix)]
        except StorageError as error:
            if error.outcome_unknown or status_of(error) == 429:
                raise  # no answer; else these credentials, or this server, can't list them
        return RecursiveListing(files, uploads, {})

    def _remove(self, name: str) -> None:
        self._bucket.remove(self._key(name), self.location(name))

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        for upload in uploads:
            self._bucket.abort_upload(self.location(upload.name), self._key(upload.name), upload.upload_id)

    def now_seconds(self) -> float:
        reply = self._bucket.call("ask for the time", self.path, lambda: self._bucket.send("head_bucket"))
        return parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()


class S3Output(PartedOutput):
    """A new object."""

    def __init__(
        self, bucket: S3Bucket, key: str, where: str, part_nbytes: int, *, replaces: bool = False, grow: bool
    ) -> None:
        super().__init__(where, part_nbytes, replaces=replaces)
        self._bucket, self._key, self._grow = bucket, key, grow
        self._parts: list[dict[str, Any]] = []
        self._nbytes = 0
        self._upload_id: str | None = None
        self._uploads_lost = False  # whether there may be an upload whose id never arrived
        self._soon = {"deadline_seconds": bucket.removal_seconds}

    def close(self) -> None:
        super().close()
        if self._uploads_lost:
            self._clean_up(self._abort_lost_uploads)

    def _finish(self) -> None:
        if self._upload_id is None:
            self._may_exist = True
            data = self._part.getvalue()
            self._bucket.call("write", self._where, lambda: self._bucket.put(self._key, data))
        else:
            if self._part.tell():
                self._send_part()
            self._complete()

    def _send(self, what: str, operation: str, **parameters: Any) -> tuple[dict[str, Any], int]:
        """Return the response, and how often the request was sent."""
        attempt = functools.partial(self._bucket.send, operation, Key=self._key, **parameters)
        done = self._bucket.perform(what, self._where, attempt)
        return done.value, done.attempts

    def _send_part(self) -> None:
        if self._upload_id is None:
            self._uploads_lost = True
            begun, attempts = self._send("begin an upload of", "create_multipart_upload")
            self._upload_id, self._uploads_lost = begun["UploadId"], attempts > 1
        number, body = len(self._parts) + 1, self._take_part()
        sent, _ = self._send("write", "upload_part", UploadId=self._upload_id, PartNumber=number, Body=body)
        # with s3_additional_kwargs={"ChecksumAlgorithm": ...} the server needs each part's checksum again
        names = [name for name in sent if name.startswith("Checksum") and name != "ChecksumType"]
        checksums = {name: sent[name] for name in names}
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"], **checksums})
        self._nbytes += len(body)
        if self._grow and number % _PARTS_BEFORE_GROWTH == 0:
            self._part_nbytes *= 2

    def _complete(self) -> None:
        parts = {"Parts": self._parts}
        self._may_exist = True
        try:
            self._send("complete", "complete_multipart_upload", UploadId=self._upload_id, MultipartUpload=parts)
        except StorageError as error:
            # a missing upload: completed by an attempt whose reply was lost?
            if status_of(error) != 404 or not self._is_complete():
                raise

    def _is_complete(self) -> bool:
        try:
            found = self._bucket.call("look up", self._where, lambda: self._bucket.head(self._key))
        except StorageError:
            return False
        if found is None:
            return False
        if self._replaces:  # what was there before may be as long
            return found.version.strip('"') == self._expected_version()
        return found.nbytes == self._nbytes and found.version.rpartition("-")[2] == str(len(self._parts))

    def _expected_version(self) -> str:
        """Return the ETag that S3 gives to these parts, unless it encrypts them with a key of KMS.

        Of https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html.
        """
        try:
            parts = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in self._parts)
        except ValueError:
            return ""
        return f"{hashlib.md5(parts, usedforsecurity=False).hexdigest()}-{len(self._parts)}"

    def _discard(self) -> None:
        if self._upload_id is not None:
            self._clean_up(self._abort_upload)
        if self._uploads_lost:
            self._clean_up(self._abort_lost_uploads)
        if self._may_exist and not self._replaces:  # a close that failed may have taken effect nevertheless
            self._clean_up(lambda: self._bucket.remove(self._key, self._where))

    def _abort_upload(self) -> None:
        assert self._upload_id is not None
        self._bucket.abort_upload(self._where, self._key, self._upload_id, **self._soon)

    def _abort_lost_uploads(self) -> None:
        for upload in list(self._bucket.uploads(self._where, self._key, **self._soon)):
            if upload["Key"] == self._key:
                self._bucket.abort_upload(self._where, self._key, upload["UploadId"], **self._soon)
