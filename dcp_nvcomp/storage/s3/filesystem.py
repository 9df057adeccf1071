"""A checkpoint's directory on S3: objects below a prefix, through an s3fs filesystem."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from dcp_nvcomp.calls.suggestions import unknown_option
from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import Below, FileInfo, OutputStream, UnfinishedUpload, already_published, too_short
from dcp_nvcomp.storage.conditional import publish
from dcp_nvcomp.storage.remote import RemoteFilesystem
from dcp_nvcomp.storage.reread import is_stored
from dcp_nvcomp.storage.s3.client import S3Client, answer_of
from dcp_nvcomp.storage.s3.object import S3Object, S3Output, S3Target, refuses_conditions


def check_additional_kwargs(fs: Any) -> None:
    """s3fs drops silently what no S3 operation takes: a mistyped ServerSideEncryption would store plain data."""
    model = fs.s3.meta.service_model
    operations = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject")
    names = {"acl"}.union(*(model.operation_model(operation).input_shape.members for operation in operations))
    for option in fs.s3_additional_kwargs.keys() - names:
        close = difflib.get_close_matches(option, sorted(names), n=1, cutoff=0.6)
        raise unknown_option(
            option, close or ["ServerSideEncryption"], storage="s3_additional_kwargs, with the parameters of PutObject,"
        )


def drop_expect_header(fs: Any) -> None:
    """Let uploads time out: while aiohttp waits for "100 Continue", botocore's read_timeout does not run."""
    from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

    fs.s3.meta.events.unregister("before-call.s3", add_expect_header)


class S3Filesystem(RemoteFilesystem):
    """S3 and compatible stores."""

    def __init__(
        self,
        path: str,
        fs: Any,
        root: str,
        *,
        options: Mapping[str, Any],
        part_nbytes: int,
        parts_grow: bool,
        deadline_seconds: float,
    ) -> None:
        self._bucket, prefix, _ = fs.split_path(root)
        super().__init__(path, prefix, part_nbytes, options)
        self._parts_grow = parts_grow
        # s3fs sends it with its own files only
        acl = fs.s3_additional_kwargs.get("acl")
        self._client = S3Client(fs, deadline_seconds, {"ACL": acl} if acl else {}, redact=self._redact)
        self._witness: tuple[str, bytes] | None = None  # what this object published last: it is certainly there

    def _object(self, name: str) -> S3Object:
        return S3Object(self._client, self._bucket, self._key(name), self.location(name))

    def create_directory(self) -> None:
        pass  # there are none

    def open_output(self, name: str) -> OutputStream:
        return S3Output(self._object(name), self._part_nbytes, self._parts_grow)

    def open_replacement(self, name: str) -> OutputStream:
        return S3Output(self._object(name), self._part_nbytes, self._parts_grow, replaces=True)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        if overwrite:
            self._replace(name, data)
            self._witness = (name, data)
        else:
            self._create(name, data)

    def _replace(self, name: str, data: bytes) -> None:
        publish(self._client, S3Target(self._object(name)), data, overwrite=True)

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
            self._replace(name, data)
        if not self._is_there(name, data):
            raise already_published(self.location(name))

    def _put_if_none(self, name: str, data: bytes) -> bool:
        """Return False if the server refuses conditions."""
        try:
            publish(self._client, S3Target(self._object(name)), data, overwrite=False)
        except StorageError as error:
            if refuses_conditions(error):
                return False
            raise
        return True

    def _honours_conditions(self) -> bool | None:
        """Return whether the server keeps an existing object when a PUT asks for that; None if that can't be tried."""
        if self._witness is None:
            return None
        name, data = self._witness
        try:
            self._object(name).put(data, IfNoneMatch="*")
        except StorageError as error:
            if answer_of(error)[0] == 412:
                return True
            if not refuses_conditions(error):
                raise
        return False

    def _is_there(self, name: str, data: bytes) -> bool:
        return is_stored(lambda: self._get_checked(name, 0, len(data) + 1), data)

    def _get(self, name: str, start: int, stop: int) -> bytes:
        target = self._object(name)
        try:
            return target.perform("read", lambda: target.get(Range=f"bytes={start}-{stop - 1}"))
        except StorageError as error:
            if answer_of(error)[0] == 416:
                nbytes = self.file_nbytes(name)
                if nbytes is not None and nbytes <= start:
                    raise too_short(target.location, start, stop, nbytes) from error
            raise

    def file_nbytes(self, name: str) -> int | None:
        found = self._object(name).look_up()
        return None if found is None else int(found["ContentLength"])

    def list_files(self) -> list[FileInfo]:
        prefix = f"{self._root}/" if self._root else ""
        found = []
        for item in self._listing("list", "list_objects_v2", "Contents", Prefix=prefix, Delimiter="/"):
            name = item["Key"].removeprefix(prefix)
            if name and not name.endswith("/"):  # what web consoles make for a "folder"
                found.append(FileInfo(name, int(item["Size"]), item["LastModified"].timestamp()))
        return sorted(found, key=lambda file: file.name)

    def list_folders(self) -> list[str]:
        prefix = f"{self._root}/" if self._root else ""
        found = self._listing("list", "list_objects_v2", "CommonPrefixes", Prefix=prefix, Delimiter="/")
        return sorted(item["Prefix"].removeprefix(prefix).rstrip("/") for item in found)

    def _call(self, what: str, operation: str, **parameters: Any) -> dict[str, Any]:
        return self._client.call(what, self.path, operation, Bucket=self._bucket, **parameters).value

    def _listing(self, what: str, operation: str, field: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        tokens: dict[str, Any] = {}
        while True:
            try:
                page = self._call(what, operation, **parameters, **tokens)
            except StorageError as error:
                if answer_of(error)[0] == 404:  # no such bucket
                    return
                raise
            yield from page.get(field, ())
            if not page.get("IsTruncated"):
                return
            next_names = {
                "NextContinuationToken": "ContinuationToken",
                "NextKeyMarker": "KeyMarker",
                "NextUploadIdMarker": "UploadIdMarker",
            }
            tokens = {own: page[theirs] for theirs, own in next_names.items() if page.get(theirs)}

    def list_uploads(self) -> list[UnfinishedUpload]:
        prefix = f"{self._root}/" if self._root else ""
        found = []
        what = "list unfinished uploads of"
        for upload in self._listing(what, "list_multipart_uploads", "Uploads", Prefix=prefix):
            name = upload["Key"].removeprefix(prefix)
            if upload["Key"].startswith(prefix) and name and "/" not in name:
                found.append(UnfinishedUpload(name, upload["UploadId"], upload["Initiated"].timestamp()))
        return found

    def list_below(self) -> Below:
        prefix = f"{self._root}/" if self._root else ""
        what = "list unfinished uploads of"
        files = [
            FileInfo(name, item["Size"], item["LastModified"].timestamp())
            for item in self._listing("list", "list_objects_v2", "Contents", Prefix=prefix)
            if (name := item["Key"].removeprefix(prefix)) and not name.endswith("/")
        ]
        uploads: list[str] = []
        try:
            found = self._listing(what, "list_multipart_uploads", "Uploads", Prefix=prefix)
            uploads += [item["Key"].removeprefix(prefix) for item in found]
        except StorageError as error:
            if error.outcome_unknown:
                raise  # no answer; else these credentials, or this server, can't list them
        return Below(files, uploads, {})

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        for upload in uploads:
            self._object(upload.name).abort_upload(upload.upload_id)

    def now_seconds(self) -> float:
        reply = self._call("ask for the time", "head_bucket")
        return parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def _remove(self, name: str) -> None:
        self._object(name).remove()
