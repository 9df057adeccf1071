"""A checkpoint's directory in an Azure container: blobs below a prefix, through obstore.

data files    blocks, committed when the file is complete: output.py
publish       one PUT with a condition: publish.py, replacement.py
requests      client.py bounds them
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.azure.client import AzureClient, may_be_beyond_end
from dcp_nvcomp.storage.azure.library import library
from dcp_nvcomp.storage.azure.options import azure_place
from dcp_nvcomp.storage.azure.output import AzureOutput
from dcp_nvcomp.storage.azure.publish import AzureTarget
from dcp_nvcomp.storage.base import Below, FileInfo, OutputStream, too_short
from dcp_nvcomp.storage.remote import RemoteFilesystem
from dcp_nvcomp.storage.replacement import replace
from dcp_nvcomp.storage.temporary import clock_name


class AzureFilesystem(RemoteFilesystem):
    """Azure Blob Storage."""

    def __init__(
        self,
        path: str,
        *,
        options: Mapping[str, Any],
        part_nbytes: int,
        deadline_seconds: float,
        known_options: Sequence[str] = (),
    ) -> None:
        place = azure_place(path, options, known_options)
        super().__init__(path, place.prefix, part_nbytes, options)
        self._client = AzureClient(place, deadline_seconds, Redactor(path, {**options, **place.config}))

    def create_directory(self) -> None:
        pass  # there are none

    def open_output(self, name: str) -> OutputStream:
        return AzureOutput(self._client, self._key(name), self.location(name), self._part_nbytes)

    def open_replacement(self, name: str) -> OutputStream:
        return AzureOutput(self._client, self._key(name), self.location(name), self._part_nbytes, replaces=True)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        replace(AzureTarget(self._client, self._key(name), self.location(name)), data, overwrite=overwrite)

    def _get(self, name: str, start: int, stop: int) -> bytes:
        key, where = self._key(name), self.location(name)

        def ask(store: Any) -> bytes:
            try:
                reply = library().get(store, key, options={"range": (start, stop)})
            except Exception as error:
                nbytes = self._nbytes_now(name) if may_be_beyond_end(error) else None
                if nbytes is not None and nbytes <= start:
                    raise too_short(where, start, stop, nbytes) from self._client.redact.error(error)
                raise
            data, expected = bytes(reply.bytes()), min(stop, reply.meta["size"]) - start
            if len(data) < expected:
                raise ConnectionError(f"the reply ended after {len(data)} of {expected} bytes")
            return data

        return self._client.call("read", where, ask)

    def _nbytes_now(self, name: str) -> int | None:
        """Return how long a file is that something is wrong with; None if that can't be told soon."""
        try:
            return self._look_up(self._client.hasty_store(), name)
        except StorageError:
            return None

    def file_nbytes(self, name: str) -> int | None:
        return self._look_up(self._client.store, name)

    def _look_up(self, store: Any, name: str) -> int | None:
        key = self._key(name)
        with self._client.errors("look up", self.location(name)):
            try:
                return int(library().head(store, key)["size"])
            except FileNotFoundError:
                return None

    def list_files(self) -> list[FileInfo]:
        return sorted(map(self._info, self._listed("objects")), key=lambda file: file.name)

    def list_folders(self) -> list[str]:
        prefix = f"{self._root}/" if self._root else ""
        return sorted(str(found).removeprefix(prefix).rstrip("/") for found in self._listed("common_prefixes"))

    def _listed(self, what: str) -> list[Any]:
        def list_all(store: Any) -> list[Any]:
            return list(library().list_with_delimiter(store, self._root or None)[what])

        return self._client.call("list", self.path, list_all)

    def list_below(self) -> Below:
        def list_all(store: Any) -> list[Any]:
            return [one for some in library().list(store, self._root or None) for one in some]

        return Below([*map(self._info, self._client.call("list", self.path, list_all))], [], {})

    def _info(self, found: Any) -> FileInfo:
        name = found["path"].removeprefix(f"{self._root}/" if self._root else "")
        return FileInfo(name, int(found["size"]), found["last_modified"].timestamp())

    def now_seconds(self) -> float:
        key = self._key(clock_name())

        def ask(store: Any) -> float:
            library().put(store, key, b"", use_multipart=False)
            hasty = self._client.hasty_store()
            try:
                return float(library().head(hasty, key)["last_modified"].timestamp())
            finally:
                library().delete(hasty, key)

        return self._client.call("ask for the time", self.path, ask)

    def _remove(self, name: str) -> None:
        key = self._key(name)
        with self._client.errors("remove", self.location(name)), contextlib.suppress(FileNotFoundError):
            library().delete(self._client.store, key)
