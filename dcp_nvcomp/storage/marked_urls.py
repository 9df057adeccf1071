"""`dcpz:///path` and `dcpz+s3://bucket/key`: URLs that tell stock DCP to save through this package.

The mark says who saves, not where: everything that opens storage takes such a URL for the place behind it.
"""

from __future__ import annotations

import re
from typing import Final

from dcp_nvcomp.errors import ConfigurationError

MARK: Final = "dcpz"
# The protocols behind the mark; each has an entry point of fsspec in setup.cfg.
MARKED_PROTOCOLS: Final = ("s3", "gs", "gcs", "az", "abfs", "memory")

_MARKED = re.compile(rf"{MARK}(?:\+([A-Za-z][A-Za-z0-9+.\-]*))?:(//?)(.*)", re.DOTALL | re.IGNORECASE)


def is_marked(path: str) -> bool:
    """Return True for a URL with the mark, and for what pathlib makes of one."""
    return _MARKED.fullmatch(path) is not None


def without_mark(path: str) -> str:
    """Return the path or URL without the mark; others as they are."""
    found = _MARKED.fullmatch(path)
    if found is None:
        return path
    protocol, slashes, rest = found.groups()
    if slashes != "//":
        whole = path.replace(":/", ":///" if protocol is None else "://", 1)
        raise ConfigurationError(f"{path!r} is what pathlib makes of a URL: pass {whole!r} as text, not as a Path.")
    return rest if protocol is None else f"{protocol}://{rest}"
