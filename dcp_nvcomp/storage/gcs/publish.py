"""One small object, as replacement.py publishes it: an upload says which generation it replaces (ifGenerationMatch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dcp_nvcomp.storage.gcs.client import status_of
from dcp_nvcomp.storage.gcs.object import GcsObject

_NONE: Final = "0"  # the generation of an object that is not there


@dataclass(frozen=True)
class GcsTarget:
    """One object.

    Attributes:
        target: the object.
    """

    target: GcsObject

    @property
    def where(self) -> str:
        """Its URL, for messages."""
        return self.target.where

    @property
    def deadline_seconds(self) -> float:
        """How long publishing may take."""
        return self.target.client.deadline_seconds

    def version(self) -> str | None:
        """Return the object's generation; None if there is no object."""
        found = self.target.look_up()
        return None if found is None else str(found["generation"])

    def read(self) -> bytes | None:
        """Return the object's bytes; None if there is no object."""

        async def attempt() -> bytes | None:
            try:
                return await self.target.get()
            except Exception as error:
                if status_of(error) == 404:
                    return None
                raise

        return self.target.perform("read", attempt)

    def send(self, data: bytes, before: str | None) -> None:
        """Write it once, if `before` is its generation. Who writes one object too often is told to wait, and does."""

        async def attempt() -> None:
            await self._put(data, _NONE if before is None else before)

        self.target.perform("write", attempt, may_repeat=self.target.client.is_busy)

    async def _put(self, data: bytes, generation: str) -> None:
        await self.target.put(data, ifGenerationMatch=generation)
