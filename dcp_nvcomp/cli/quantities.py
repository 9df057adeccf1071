"""Sizes, rates and times as people write them on a command line, and as they read them."""

from __future__ import annotations

import re

import typer

_NBYTES: dict[str, int] = {
    "": 1,
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate(("", "k", "M", "G", "T", "P"))},
    **{f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate(("", "K", "M", "G", "T", "P")) if power},
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_nbytes(text: str, option: str) -> int:
    """Return a size such as 70GB, 1.5TB or 512MiB in bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    unit = None if match is None else next((n for name, n in _NBYTES.items() if name.lower() == match[2].lower()), None)
    if match is None or unit is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is not a size such as 70GB, 1.5TB or 512MiB.", param_hint=option)
    return round(float(match[1]) * unit)


def parse_seconds(text: str, option: str) -> float:
    """Return a time such as 90s, 30m, 12h or 7d in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 30m, 12h or 7d.", param_hint=option)
    return float(match[1]) * _SECONDS[match[2]]


def readable_nbytes(nbytes: float) -> str:
    """Return a size in units of 10^n, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def readable_rate(rate: float) -> str:
    """Return bytes a second as GB/s or MB/s."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def readable_seconds(seconds: float) -> str:
    """Return a time with as many digits as matter."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} d"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms"
