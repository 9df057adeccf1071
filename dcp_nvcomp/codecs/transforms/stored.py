"""`bytes`: the block's elements as they are, in one plane. What `codec="none"` stores, and what plain coders code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dcp_nvcomp.codecs.base import ArrayToBytes, Plane

__all__ = ["Bytes"]


@dataclass(frozen=True)
class Bytes(ArrayToBytes):
    """One plane, `data`; coded if a coder follows."""

    name: ClassVar[str] = "bytes"

    def configuration(self) -> dict[str, Any]:
        return {}

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        return (Plane("data", nbytes, has_coder),)

    def check_flags(self, flags: int) -> bool:
        return flags == 0
