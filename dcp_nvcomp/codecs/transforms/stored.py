"""`bytes`: the block's elements as they are, in one plane. What `codec="none"` stores, and what plain coders code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dcp_nvcomp.codecs.base import U8, ArrayToBytes, Plane
from dcp_nvcomp.codecs.scratch import ScratchArrays


@dataclass(frozen=True)
class Bytes(ArrayToBytes):
    """One plane, `data`; coded if a coder follows."""

    name: ClassVar[str] = "bytes"
    is_plain: ClassVar[bool] = True

    def configuration(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Bytes:
        return cls()

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        return (Plane("data", nbytes, has_coder),)

    def check_flags(self, flags: int) -> bool:
        return flags == 0

    def split(self, block: U8, planes: Sequence[U8]) -> int:
        np.copyto(planes[0], block)
        return 0

    def merge(self, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        np.copyto(block, planes[0])
