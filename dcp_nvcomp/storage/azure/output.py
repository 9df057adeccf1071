"""One data file on its way to Azure: blocks, which become a blob when it is closed; before that nobody sees any of it.

Blocks that were never committed are removed by Azure itself, after a week.
"""

from __future__ import annotations

import errno
from typing import Any, Final

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.azure.client import AzureClient
from dcp_nvcomp.storage.azure.library import library
from dcp_nvcomp.storage.parts import PartedOutput

_AT_ONCE: Final = 2  # so that one is sent while the next one is collected


class AzureOutput(PartedOutput):
    """A new blob."""

    def __init__(self, client: AzureClient, key: str, where: str, part_nbytes: int, *, replaces: bool = False) -> None:
        super().__init__(where, part_nbytes, replaces=replaces)
        self._client, self._key = client, key
        self._writer: Any = None
        self._nbytes = 0

    def _send_part(self) -> None:
        with self._client.errors("write", self._where):
            if self._writer is None:
                self._writer = library().open_writer(
                    self._client.store, self._key, buffer_size=self._part_nbytes, max_concurrency=_AT_ONCE
                )
            part = self._take_part()  # it is sent after `write` returned
            self._writer.write(part)
            self._nbytes += len(part)

    def _finish(self) -> None:
        self._may_exist = True
        if self._writer is None:
            with self._client.errors("write", self._where, may_be_done=True):
                library().put(self._client.store, self._key, self._part.getvalue(), use_multipart=False)
        else:
            if self._part.tell():
                self._send_part()
            self._commit()
        self._writer = None

    def _commit(self) -> None:
        try:
            with self._client.errors("complete", self._where, may_be_done=True):
                self._writer.close()
        except StorageError as error:
            # a commit whose answer was lost is refused when repeated
            if error.errno == errno.EACCES or self._replaces or not self._is_complete():
                raise

    def _is_complete(self) -> bool:
        try:
            with self._client.errors("look up", self._where):
                return bool(library().head(self._client.hasty_store(), self._key)["size"] == self._nbytes)
        except StorageError:
            return False

    def _discard(self) -> None:
        self._writer = None  # dropped: what was sent is never committed
        if self._may_exist and not self._replaces:
            self._clean_up(self._remove)

    def _remove(self) -> None:
        try:
            with self._client.errors("remove", self._where):
                library().delete(self._client.hasty_store(), self._key)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
