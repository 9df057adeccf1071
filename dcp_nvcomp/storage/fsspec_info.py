"""What fsspec's filesystems tell about a file, each in its own words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Final

# What they call the time of the last write, in `info` and `ls`.
_MODIFIED: Final = ("LastModified", "mtime", "modified", "updated", "last_modified", "created", "modify")
_FTP_TIME: Final = re.compile(r"(\d{14})(\.\d+)?")  # as RFC 3659 has it


def modified_seconds(info: Mapping[str, Any]) -> float | None:
    """Return when a file was last written, in seconds since 1970; None if the client does not tell."""
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.replace(tzinfo=value.tzinfo or timezone.utc).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str) and (ftp := _FTP_TIME.fullmatch(value)):
            parsed = datetime.strptime(ftp[1], "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc)
            return parsed.timestamp() + float(ftp[2] or 0)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                parsed = datetime.fromisoformat(value.replace("Z", "+00:00"))
                return parsed.replace(tzinfo=parsed.tzinfo or timezone.utc).timestamp()
    return None
