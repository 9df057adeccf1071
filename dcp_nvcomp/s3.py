"""What only S3 has, asked of an s3fs filesystem: its requests' options, its unfinished uploads, its clock."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from .filesystem_base import UnfinishedUpload
from .options import unknown_option

__all__ = ["abort_upload", "check_additional_kwargs", "drop_expect_header", "list_uploads", "now_seconds"]


def check_additional_kwargs(fs: Any) -> None:
    """s3fs drops silently what no S3 operation takes: a mistyped ServerSideEncryption would store plain data."""
    model = fs.s3.meta.service_model
    operations = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject")
    names = {"acl"}.union(*(model.operation_model(operation).input_shape.members for operation in operations))
    for option in fs.s3_additional_kwargs.keys() - names:
        close = difflib.get_close_matches(option, sorted(names), n=1, cutoff=0.6)
        raise unknown_option(option, close, "s3_additional_kwargs takes the parameters of S3's PutObject and the like")


def drop_expect_header(fs: Any) -> None:
    """Let uploads time out: while aiohttp waits for "100 Continue", botocore's read_timeout does not run."""
    from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

    fs.s3.meta.events.unregister("before-call.s3", add_expect_header)


def list_uploads(fs: Any, root: str) -> list[UnfinishedUpload]:
    """Unfinished multipart uploads of objects directly below `root`, which is `bucket/prefix`."""
    bucket, _, prefix = root.partition("/")
    prefix = f"{prefix}/" if prefix else ""
    found = []
    for page in _upload_pages(fs, bucket, prefix):
        for upload in page.get("Uploads", ()):
            name = upload["Key"].removeprefix(prefix)
            if upload["Key"].startswith(prefix) and name and "/" not in name:
                found.append(UnfinishedUpload(name, upload["UploadId"], upload["Initiated"].timestamp()))
    return found


def _upload_pages(fs: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    markers: dict[str, str] = {}
    while True:
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
        yield page
        if not page.get("IsTruncated"):
            return
        markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def abort_upload(fs: Any, key: str, upload_id: str) -> None:
    """Throw away the parts of an upload; one that is gone already is fine."""
    from botocore.exceptions import ClientError  # type: ignore[import-untyped]

    bucket, _, name = key.partition("/")
    try:
        fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=upload_id)
    except FileNotFoundError:
        pass
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") != "NoSuchUpload":
            raise


def now_seconds(fs: Any, root: str) -> float:
    """The time by the server's clock, from the Date header of a reply."""
    reply = fs.call_s3("head_bucket", Bucket=root.partition("/")[0])
    return parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
