"""One data file on its way to S3: a single PUT if it is small, else a multipart upload, which shows when completed.

Not s3fs's own files: their requests know no deadline, and a file that is dropped or left by an exception is committed.
"""

from __future__ import annotations

from typing import Any

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.parts import PartedOutput
from dcp_nvcomp.storage.s3.client import answer_of
from dcp_nvcomp.storage.s3.object import S3Object

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
