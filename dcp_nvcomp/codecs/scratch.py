"""Scratch memory that a thread reuses from block to block."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class ScratchArrays:
    """Arrays that are reused from block to block; one of these per thread, grown as needed."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def array(self, name: str, count: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """An uninitialised array of `count` elements that the next call with the same name overwrites."""
        held = self._arrays.get(name)
        if held is None or held.size < count or held.dtype != dtype:
            held = self._arrays[name] = np.empty(count, dtype)
        return held[:count]
