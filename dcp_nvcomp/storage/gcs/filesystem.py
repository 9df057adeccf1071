"""A checkpoint's directory in a bucket of Google Cloud Storage: objects below a prefix.

data files    one upload, or a resumable one in parts: output.py, session.py
publish       one upload with a condition: publish.py, replacement.py
requests      client.py sends them once, attempts.py repeats them inside the deadline
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import Below, FileInfo, OutputStream, too_short
from dcp_nvcomp.storage.gcs.client import GcsClient, connect, secrets_of, status_of
from dcp_nvcomp.storage.gcs.object import GcsObject
from dcp_nvcomp.storage.gcs.options import gcs_place
from dcp_nvcomp.storage.gcs.output import GcsOutput
from dcp_nvcomp.storage.gcs.publish import GcsTarget
from dcp_nvcomp.storage.remote import RemoteFilesystem
from dcp_nvcomp.storage.replacement import replace
from dcp_nvcomp.storage.temporary import clock_name


class GcsFilesystem(RemoteFilesystem):
    """Google Cloud Storage."""

    def __init__(
        self, path: str, *, options: Mapping[str, Any], deadline_seconds: float, known_options: Sequence[str] = ()
    ) -> None:
        place = gcs_place(path, options, known_options)
        fs = connect(place)
        super().__init__(path, place.prefix, place.part_nbytes, {**place.client, "credentials": secrets_of(fs)})
        self._bucket = place.bucket
        self._client = GcsClient(fs, deadline_seconds, self._redact)

    def _object(self, name: str) -> GcsObject:
        return GcsObject(self._client, self._bucket, self._key(name), self.location(name))

    def create_directory(self) -> None:
        pass  # there are none

    def open_output(self, name: str) -> OutputStream:
        return GcsOutput(self._object(name), self._part_nbytes)

    def open_replacement(self, name: str) -> OutputStream:
        return GcsOutput(self._object(name), self._part_nbytes, replaces=True)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        replace(GcsTarget(self._object(name)), data, overwrite=overwrite)

    def _get(self, name: str, start: int, stop: int) -> bytes:
        target = self._object(name)
        try:
            return target.perform("read", lambda: target.get(start, stop))
        except StorageError as error:
            if status_of(error) == 416:
                nbytes = self.file_nbytes(name)
                if nbytes is not None and nbytes <= start:
                    raise too_short(target.where, start, stop, nbytes) from error
            raise

    def file_nbytes(self, name: str) -> int | None:
        found = self._object(name).look_up()
        return None if found is None else int(found["size"])

    def list_files(self) -> list[FileInfo]:
        return sorted(self._listed(delimiter="/"), key=lambda file: file.name)

    def list_folders(self) -> list[str]:
        prefix = self._prefix()
        pages = self._pages({"prefix": prefix, "fields": "nextPageToken,prefixes", "delimiter": "/"})
        return sorted(found.removeprefix(prefix).rstrip("/") for page in pages for found in page.get("prefixes", ()))

    def list_below(self) -> Below:
        return Below([*self._listed()], [], {})

    def _prefix(self) -> str:
        return f"{self._root}/" if self._root else ""

    def _listed(self, **parameters: str) -> Iterator[FileInfo]:
        prefix = self._prefix()
        asked = {"prefix": prefix, "fields": "nextPageToken,items(name,size,updated)", **parameters}
        for page in self._pages(asked):
            for found in page.get("items", ()):
                name = found["name"].removeprefix(prefix)
                if name and not name.endswith("/"):  # what web consoles make for a "folder"
                    yield FileInfo(name, int(found["size"]), _seconds(found))

    def _pages(self, asked: dict[str, str]) -> Iterator[dict[str, Any]]:
        while True:
            page = self._page(asked)
            yield page
            if not page.get("nextPageToken"):
                return
            asked["pageToken"] = page["nextPageToken"]

    def _page(self, asked: dict[str, str]) -> dict[str, Any]:
        async def attempt() -> dict[str, Any]:
            try:
                return (await self._client.send("GET", self._client.url(self._bucket, parameters=asked))).json()
            except Exception as error:
                if status_of(error) == 404:  # no such bucket
                    return {}
                raise

        return self._client.perform("list", self.path, attempt).value

    def now_seconds(self) -> float:
        target = self._object(clock_name())
        try:
            return _seconds(target.perform("ask for the time", lambda: target.put(b"")))
        finally:
            target.remove(deadline_seconds=self._client.removal_seconds)

    def _remove(self, name: str) -> None:
        self._object(name).remove()


def _seconds(found: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(found["updated"].replace("Z", "+00:00")).timestamp()
