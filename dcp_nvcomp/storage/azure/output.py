"""One data file on its way to Azure: blocks, which become a blob when it is closed; before that nobody sees any of it.

Blocks that were never committed are removed by Azure itself, after a week.
"""

from __future__ import annotations

import errno
import io
import logging
from typing import Any, Final

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.azure.client import AzureClient
from dcp_nvcomp.storage.base import OutputStream

__all__ = ["AzureOutput"]

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 2  # so that one is sent while the next one is collected


class AzureOutput(OutputStream):
    """A new blob.

    Args:
        client: the container.
        key: name of the blob, which no other save uses.
        where: its URL, for messages.
        part_nbytes: how long blocks are.
        replaces: whether there may be an older blob, which stays if this one does not get there.
    """

    def __init__(self, client: AzureClient, key: str, where: str, part_nbytes: int, *, replaces: bool = False) -> None:
        self._client, self._key, self._where, self._replaces = client, key, where, replaces
        self._state = "open"  # then "broken", "closed" or "aborted"
        self._part_nbytes, self._part = part_nbytes, io.BytesIO()
        self._writer: Any = None
        self._nbytes = 0
        self._may_exist = False

    def write(self, data: memoryview | bytes) -> None:
        assert self._state == "open"
        view = memoryview(data).cast("B")
        self._state = "broken"
        while view:
            taken = view[: self._part_nbytes - self._part.tell()]
            self._part.write(taken)
            view = view[len(taken) :]
            if self._part.tell() == self._part_nbytes:
                self._send_part()
        self._state = "open"

    def _send_part(self) -> None:
        import obstore

        with self._client.errors("write", self._where):
            if self._writer is None:
                self._writer = obstore.open_writer(
                    self._client.store, self._key, buffer_size=self._part_nbytes, max_concurrency=_AT_ONCE
                )
            part, self._part = self._part.getvalue(), io.BytesIO()  # a copy: it is sent after `write` returned
            self._writer.write(part)
            self._nbytes += len(part)

    def close(self) -> None:
        import obstore

        assert self._state == "open"
        self._state, self._may_exist = "broken", True
        if self._writer is None:
            with self._client.errors("write", self._where, may_be_done=True):
                obstore.put(self._client.store, self._key, self._part.getvalue(), use_multipart=False)
        else:
            if self._part.tell():
                self._send_part()
            self._commit()
        self._state, self._writer, self._part = "closed", None, io.BytesIO()

    def _commit(self) -> None:
        try:
            with self._client.errors("complete", self._where, may_be_done=True):
                self._writer.close()
        except StorageError:
            if self._replaces or not self._is_complete():  # a commit whose answer was lost is refused when repeated
                raise

    def _is_complete(self) -> bool:
        import obstore

        try:
            with self._client.errors("look up", self._where):
                return bool(obstore.head(self._client.store, self._key)["size"] == self._nbytes)
        except StorageError:
            return False

    def abort(self) -> None:
        if self._state in ("closed", "aborted"):
            return
        import obstore

        self._part = io.BytesIO()
        self._state, self._writer = "aborted", None  # dropped: what was sent is never committed
        if self._may_exist and not self._replaces:
            try:
                with self._client.errors("remove", self._where):
                    obstore.delete(self._client.store, self._key)
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    logger.warning("Something of the unfinished %s may be left: %s", self._where, error)
