"""One object on S3: the requests about it, and its upload.

Not by s3fs's own files: their requests know no deadline, and a file that is dropped by an exception is committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.attempts import Done
from dcp_nvcomp.storage.conditional import AS_IT_IS, UNREADABLE, Target
from dcp_nvcomp.storage.remote import PartedOutput
from dcp_nvcomp.storage.s3.client import S3Client, answer_of, body_of

T = TypeVar("T")

_UNKNOWN_CONDITIONS: Final = ("NotImplemented", "InvalidArgument", "InvalidRequest")


def refuses_conditions(error: BaseException) -> bool:
    """True if the server's response is that it does not know conditional writes."""
    status, code = answer_of(error)
    return status in (405, 501) or code in _UNKNOWN_CONDITIONS


@dataclass(frozen=True)
class S3Object:
    """An object, which may not exist. `send`, `head` and `get` are one attempt; the others retry until the deadline."""

    client: S3Client
    bucket: str
    key: str
    location: str  # its name in messages

    def perform(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        return self.client.perform(what, self.location, attempt).value

    def call(self, what: str, operation: str, **parameters: Any) -> Done[dict[str, Any]]:
        return self.client.call(what, self.location, operation, Bucket=self.bucket, Key=self.key, **parameters)

    async def send(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Send a request once."""
        return await self.client.send(operation, Bucket=self.bucket, Key=self.key, **parameters)

    async def head(self) -> dict[str, Any] | None:
        """Return the object's headers, or None if there is no such object."""
        try:
            return await self.send("head_object")
        except Exception as error:
            if answer_of(error)[0] == 404:
                return None
            raise

    async def get(self, **parameters: Any) -> bytes:
        """Return the object's bytes, or those of a `Range`."""
        return await body_of(await self.send("get_object", **parameters))

    def look_up(self) -> dict[str, Any] | None:
        """Return the object's headers, or None if there is no such object."""
        return self.perform("look up", self.head)

    def put(self, data: bytes, **conditions: str) -> None:
        self.call("write", "put_object", Body=data, **conditions)

    def remove(self) -> None:
        self._delete("remove", "delete_object", deadline_seconds=self.client.removal_seconds)

    def upload_ids(self, *, deadline_seconds: float) -> list[str]:
        """Return the ids of the object's unfinished multipart uploads."""
        what, operation = "list unfinished uploads of", "list_multipart_uploads"
        limits: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self.key, "deadline_seconds": deadline_seconds}
        page = self.client.call(what, self.location, operation, **limits).value
        return [upload["UploadId"] for upload in page.get("Uploads", ()) if upload["Key"] == self.key]

    def abort_upload(self, upload_id: str, *, deadline_seconds: float | None = None) -> None:
        """Delete the parts of a multipart upload, if it exists."""
        what = "abort an unfinished upload of"
        self._delete(what, "abort_multipart_upload", deadline_seconds=deadline_seconds, UploadId=upload_id)

    def _delete(self, what: str, operation: str, **parameters: Any) -> None:
        try:
            self.call(what, operation, **parameters)
        except StorageError as error:
            if answer_of(error)[0] != 404:
                raise


class S3Target(Target):
    """An object as conditional.py publishes it, by If-Match or If-None-Match."""

    forms = (AS_IT_IS, '"{}"', None)  # Ceph wants an ETag bare and the standard quoted

    def __init__(self, target: S3Object) -> None:
        self.where = target.location
        self._target = target

    async def version(self) -> str | None:
        try:
            found = await self._target.head()
        except Exception as error:
            if answer_of(error)[0] == 403:
                return UNREADABLE
            raise
        return None if found is None else str(found.get("ETag")).strip('"')

    async def read(self) -> bytes | None:
        try:
            return await self._target.get()
        except Exception as error:
            if answer_of(error)[0] in (403, 404):
                return None
            raise

    async def write(self, data: bytes, before: str | None, form: str | None) -> None:
        condition: dict[str, str] = {}
        if form is not None and before is None:
            condition["IfNoneMatch"] = "*"
        elif form is not None and before is not None and before != UNREADABLE:
            condition["IfMatch"] = form.format(before)
        await self._target.send("put_object", Body=data, **condition)

    def is_refusal(self, error: Exception) -> bool:
        status, code = answer_of(error)
        return status == 412 or code == "NoSuchKey"

    def knows_no_conditions(self, error: Exception) -> bool:
        return refuses_conditions(error)


_PARTS_BEFORE_GROWTH = 2000  # S3 takes 10,000 parts: with this growth nearly 1 TiB


class S3Output(PartedOutput):
    """A new object."""

    def __init__(self, target: S3Object, part_nbytes: int, parts_grow: bool, *, replaces: bool = False) -> None:
        super().__init__(target.location, part_nbytes, replaces=replaces)
        self._target, self._parts_grow = target, parts_grow
        self._parts: list[dict[str, Any]] = []
        self._nbytes = 0
        self._upload_id: str | None = None
        self._uploads_lost = False  # whether there may be an upload whose id never arrived

    def close(self) -> None:
        super().close()
        if self._uploads_lost:
            self._clean_up(self._abort_lost_uploads)

    def _finish(self) -> None:
        if self._upload_id is None:
            self._may_exist = True
            self._target.put(self._part.getvalue())
        else:
            if self._part.tell():
                self._send_part()
            self._complete()

    def _send_part(self) -> None:
        if self._upload_id is None:
            self._uploads_lost = True
            begun = self._target.call("begin an upload of", "create_multipart_upload")
            self._upload_id, self._uploads_lost = begun.value["UploadId"], begun.attempts > 1
        number, body = len(self._parts) + 1, self._take_part()
        sent = self._target.call("write", "upload_part", UploadId=self._upload_id, PartNumber=number, Body=body)
        # with s3_additional_kwargs={"ChecksumAlgorithm": ...} the server wants to hear each part's checksum again
        names = [name for name in sent.value if name.startswith("Checksum") and name != "ChecksumType"]
        checksums = {name: sent.value[name] for name in names}
        self._parts.append({"PartNumber": number, "ETag": sent.value["ETag"], **checksums})
        self._nbytes += len(body)
        if self._parts_grow and number % _PARTS_BEFORE_GROWTH == 0:
            self._part_nbytes *= 2

    def _complete(self) -> None:
        parts = {"Parts": self._parts}
        self._may_exist = True
        try:
            self._target.call("complete", "complete_multipart_upload", UploadId=self._upload_id, MultipartUpload=parts)
        except StorageError as error:
            # a missing upload: completed by an attempt whose reply was lost?
            if answer_of(error)[0] != 404 or not self._is_complete():
                raise

    def _is_complete(self) -> bool:
        try:
            found = self._target.look_up()
        except StorageError:
            return False
        if found is None:
            return False
        part_count = str(found.get("ETag", "")).strip('"').rpartition("-")[2]
        return int(found["ContentLength"]) == self._nbytes and part_count == str(len(self._parts))

    def _discard(self) -> None:
        if self._upload_id is not None:
            self._clean_up(self._abort_upload)
        if self._uploads_lost:
            self._clean_up(self._abort_lost_uploads)
        if self._may_exist and not self._replaces:  # a close that failed may have taken effect nevertheless
            self._clean_up(self._target.remove)

    def _abort_upload(self) -> None:
        assert self._upload_id is not None
        self._target.abort_upload(self._upload_id, deadline_seconds=self._target.client.removal_seconds)

    def _abort_lost_uploads(self) -> None:
        for upload_id in self._target.upload_ids(deadline_seconds=self._target.client.removal_seconds):
            self._target.abort_upload(upload_id, deadline_seconds=self._target.client.removal_seconds)
