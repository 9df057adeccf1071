"""Names of the files that exist only while something is published or the storage is asked for its time."""

from __future__ import annotations

import re
import uuid
from typing import Final

_TEMPORARY: Final = re.compile(r"(.+)\.[0-9a-f]{32}\.tmp", re.DOTALL)
_CLOCK: Final = re.compile(r"\.clock-[0-9a-f]{32}")


def temporary_name(name: str) -> str:
    """Return a new name for a file that is about to be moved to `name`."""
    return f"{name}.{uuid.uuid4().hex}.tmp"


def published_name(temporary: str) -> str | None:
    """Return the name that `temporary_name` was given, None for any other name."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


def clock_name() -> str:
    """Return a new name for a file that is written to learn the storage's time."""
    return f".clock-{uuid.uuid4().hex}"


def is_clock(name: str) -> bool:
    """True for a name made by `clock_name`."""
    return _CLOCK.fullmatch(name) is not None
