"""One small blob, as replacement.py publishes it: a PUT says what it replaces, by If-Match or If-None-Match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.storage.azure.client import AzureClient
from dcp_nvcomp.storage.azure.library import library


@dataclass(frozen=True)
class AzureTarget:
    """One blob.

    Attributes:
        client: the container.
        key: name of the blob.
        where: its URL, for messages.
    """

    client: AzureClient
    key: str
    where: str

    @property
    def deadline_seconds(self) -> float:
        """How long publishing may take."""
        return self.client.deadline_seconds

    def version(self) -> str | None:
        """Return the blob's ETag; None if there is no blob."""

        def ask(store: Any) -> str | None:
            try:
                found: str | None = library().head(store, self.key)["e_tag"]
            except FileNotFoundError:
                return None
            return found

        return self.client.call("look up", self.where, ask)

    def read(self) -> bytes | None:
        """Return the blob's bytes; None if there is no blob."""

        def ask(store: Any) -> bytes | None:
            try:
                return bytes(library().get(store, self.key).bytes())
            except FileNotFoundError:
                return None

        return self.client.call("read", self.where, ask)

    def send(self, data: bytes, before: str | None) -> None:
        """Write it once, if `before` is its ETag."""
        with self.client.errors("write", self.where, may_be_done=True):
            self._put(data, before)

    def _put(self, data: bytes, before: str | None) -> None:
        mode: Any = "create" if before is None else {"e_tag": before}
        library().put(self.client.store_once, self.key, data, mode=mode, use_multipart=False)
