"""A checkpoint's directory in a bucket or container: objects below a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import Below, FileInfo, OutputStream, clock_name, too_short
from dcp_nvcomp.storage.conditional import publish
from dcp_nvcomp.storage.objects.azure import AzureContainer, AzureOutput
from dcp_nvcomp.storage.objects.bucket import BEYOND_END, Bucket, BucketTarget, Found, NoAnswerError, status_of
from dcp_nvcomp.storage.objects.gcs import GcsBucket, GcsOutput, connect, secrets_of
from dcp_nvcomp.storage.objects.options import AZURE, Place, azure_place, gcs_place
from dcp_nvcomp.storage.remote import RemoteFilesystem


def open_object_store(
    path: str, protocol: str, *, options: Mapping[str, Any], deadline_seconds: float, known_options: Sequence[str]
) -> ObjectFilesystem:
    """Open a URL of Azure or Google Cloud Storage; no request is sent to the storage."""
    if protocol in AZURE:
        place = azure_place(path, options, known_options)
        container = AzureContainer(place, deadline_seconds, Redactor(path, {**options, **place.client}))
        return ObjectFilesystem(path, place, container, AzureOutput)
    place = gcs_place(path, options, known_options)
    fs = connect(place)
    redact = Redactor(path, {**place.client, "credentials": secrets_of(fs)})
    return ObjectFilesystem(path, place, GcsBucket(fs, place.bucket, deadline_seconds, redact), GcsOutput)


class ObjectFilesystem(RemoteFilesystem):
    """Azure Blob Storage or Google Cloud Storage."""

    def __init__(self, path: str, place: Place, bucket: Bucket, output: Callable[..., OutputStream]) -> None:
        super().__init__(path, place.prefix, place.part_nbytes, {})
        self._bucket, self._output = bucket, output

    def create_directory(self) -> None:
        pass  # there are none

    def open_output(self, name: str) -> OutputStream:
        return self._output(self._bucket, self._key(name), self.location(name), self._part_nbytes, replaces=False)

    def open_replacement(self, name: str) -> OutputStream:
        return self._output(self._bucket, self._key(name), self.location(name), self._part_nbytes, replaces=True)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        target = BucketTarget(self._bucket, self._key(name), self.location(name))
        publish(self._bucket, target, data, overwrite=overwrite)

    def _get(self, name: str, start: int, stop: int) -> bytes:
        key, where = self._key(name), self.location(name)
        try:
            return self._bucket.call("read", where, lambda: self._bucket.get(key, start, stop))
        except StorageError as error:
            nbytes = self.file_nbytes(name) if status_of(error) == BEYOND_END else None
            if nbytes is not None and nbytes <= start:
                raise too_short(where, start, stop, nbytes) from error
            raise

    def file_nbytes(self, name: str) -> int | None:
        key = self._key(name)
        found = self._bucket.call("look up", self.location(name), lambda: self._bucket.head(key))
        return None if found is None else found.nbytes

    def list_files(self) -> list[FileInfo]:
        return sorted(self._files(deep=False), key=lambda file: file.name)

    def list_folders(self) -> list[str]:
        _, folders = self._bucket.list(self.path, self._root, deep=False)
        return sorted(self._name(folder).rstrip("/") for folder in folders)

    def list_below(self) -> Below:
        return Below(self._files(deep=True), [], {})

    def _files(self, *, deep: bool) -> list[FileInfo]:
        found, _ = self._bucket.list(self.path, self._root, deep=deep)
        named = [(self._name(one.key), one) for one in found]
        # what web consoles make for a "folder" is no file
        return [FileInfo(name, one.nbytes, one.modified_seconds) for name, one in named if name and name[-1] != "/"]

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self._root}/" if self._root else "")

    def now_seconds(self) -> float:
        key, bucket = self._key(clock_name()), self._bucket

        async def attempt() -> Found:
            await bucket.put(key, b"")
            found = await bucket.head(key)
            if found is None:
                raise NoAnswerError("an object that was just written is not there")
            return found

        try:
            return bucket.call("ask for the time", self.path, attempt).modified_seconds
        finally:
            bucket.call("remove", self.path, lambda: bucket.delete(key), deadline_seconds=bucket.removal_seconds)

    def _remove(self, name: str) -> None:
        key = self._key(name)
        self._bucket.call("remove", self.location(name), lambda: self._bucket.delete(key))
