"""Replaces a small blob so that no request of ours can undo what another save publishes later.

A PUT that got no answer may still be carried out, after another save has published and removed our files: it would
bring back metadata that names nothing. So each says what it replaces (If-Match, or If-None-Match if there is nothing),
is sent once at a time, and before it is sent again we look whether it was carried out.
"""

from __future__ import annotations

import errno
import random
import time
from typing import Any

from dcp_nvcomp.errors import ConcurrentSaveError, StorageError
from dcp_nvcomp.storage.azure.client import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, AzureClient
from dcp_nvcomp.storage.base import already_published

__all__ = ["Replacement"]


class Replacement:
    """One blob and what is to be there.

    Args:
        client: the container.
        key: name of the blob.
        where: its URL, for messages.
        data: what is to be there.
    """

    def __init__(self, client: AzureClient, key: str, where: str, data: bytes) -> None:
        self._client, self._key, self._where, self._data = client, key, where, data
        self._unsure = False  # whether an attempt had no answer

    def put(self, *, overwrite: bool) -> None:
        """Put it there.

        Args:
            overwrite: whether a blob may be replaced.

        Raises:
            ConcurrentSaveError: another save has published since an attempt of ours that had no answer; or with
                `overwrite=False` there is a blob.
            StorageError: it could not be done before the deadline.
        """
        end = time.monotonic() + self._client.deadline_seconds
        before = self._etag() if overwrite else None
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                with self._client.errors("write", self._where, may_be_done=True):
                    self._send(before)
                return
            except StorageError as error:
                if error.errno == errno.EEXIST:  # refused because of the condition
                    if self._is_ours():
                        return
                    if not overwrite:
                        raise already_published(self._where) from error
                    if self._unsure:
                        raise self._refusal() from error
                    before = self._etag()  # another save was faster; this one comes after it
                elif not error.outcome_unknown or time.monotonic() + pause >= end:
                    raise
                else:
                    self._unsure = True
                    time.sleep(pause * random.uniform(0.5, 1))  # so that ranks do not come back all at once
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                if time.monotonic() >= end:
                    raise

    def _send(self, before: str | None) -> None:
        import obstore

        mode: Any = "create" if before is None else {"e_tag": before}
        obstore.put(self._client.store_once, self._key, self._data, mode=mode, use_multipart=False)

    def _etag(self) -> str | None:
        import obstore

        def ask() -> str | None:
            try:
                found: str | None = obstore.head(self._client.store, self._key)["e_tag"]
            except FileNotFoundError:
                return None
            return found

        return self._client.call("look up", self._where, ask)

    def _is_ours(self) -> bool:
        import obstore

        def ask() -> bool:
            try:
                return bytes(obstore.get(self._client.store, self._key).bytes()) == self._data
            except FileNotFoundError:
                return False

        # twice, as bits may flip in transit
        return any(self._client.call("read", self._where, ask) for _ in range(2))

    def _refusal(self) -> ConcurrentSaveError:
        refusal = ConcurrentSaveError("Another save has published here at the same time.", path=self._where)
        refusal.outcome_unknown = True
        return refusal
