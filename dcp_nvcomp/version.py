"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _installed_version() -> str:
    try:
        return version("dcp-nvcomp")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


# read at import time: the package metadata may be unreadable later, and that must not fail a save
VERSION: Final = _installed_version()
