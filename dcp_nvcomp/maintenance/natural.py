"""The order in which people expect names with numbers in them."""

from __future__ import annotations

import re


def natural_order(text: str) -> list[tuple[int, str]]:
    """A sort key under which `layers.2` comes before `layers.10`."""
    parts = re.split(r"0*([0-9]+)", text)  # text and digits in turn
    return [(len(part) if turn % 2 else 0, part) for turn, part in enumerate(parts)]
