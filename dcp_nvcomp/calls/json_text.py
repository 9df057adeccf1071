"""JSON that people, accidents or strangers may have written: whatever is wrong with a text is a ValueError."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: bytes | str) -> Any:
    """Return what a JSON text says; ValueError for numbers that are not finite."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number
