"""What kernels computed, compared with what they must."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["WrongResultError", "expect"]


class WrongResultError(Exception):
    """A kernel computed something else than it must."""


def expect(what: str, found: npt.NDArray[np.uint8] | bytes, expected: bytes) -> None:
    """Raise `WrongResultError` if the bytes differ."""
    if bytes(found) != expected:
        raise WrongResultError(what)
