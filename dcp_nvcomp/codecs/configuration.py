"""Checks of a codec's configuration as a footer has it: JSON values that can be anything."""

from __future__ import annotations

from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any

from dcp_nvcomp.codecs.base import ALIGNMENT_NBYTES, MAX_SLICE_NBYTES
from dcp_nvcomp.errors import FormatError


def integer(configuration: dict[str, Any], key: str, codec: str) -> int:
    """Return an integer of a configuration."""
    value = configuration.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"Codec {codec!r} has {key}={shown(value)}, which must be an integer.")
    return value


def text(configuration: dict[str, Any], key: str, codec: str) -> str:
    """Return a text of a configuration."""
    value = configuration.get(key)
    if not isinstance(value, str):
        raise FormatError(f"Codec {codec!r} has {key}={shown(value)}, which must be text.")
    return value


def slice_nbytes(configuration: dict[str, Any], codec: str) -> int:
    """Return the `slice_nbytes` of a coder's configuration."""
    value = integer(configuration, "slice_nbytes", codec)
    if not 0 < value <= MAX_SLICE_NBYTES or value % ALIGNMENT_NBYTES:
        raise FormatError(f"Codec {codec!r} has slice_nbytes={shown(value)}, not a multiple of 16 from 16 to 16 MiB.")
    return value
