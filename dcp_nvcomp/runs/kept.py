"""Why each step of a run is kept, as its manager last decided: for people who list the run.

    .run/kept     {"schema": 1, "steps": {"<step>": ["last 3", "best loss"]}}

Nothing depends on it. A manager decides anew after each save, from the steps that are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.storage.base import Filesystem

_NAME = "kept"
_MOST_NBYTES = 64 << 20


def write_kept(own: Filesystem, kept: Mapping[int, tuple[str, ...]]) -> None:
    """Write down why steps are kept."""
    steps = {str(step): list(reasons) for step, reasons in sorted(kept.items())}
    own.refuse_link()
    own.publish(_NAME, json.dumps({"schema": 1, "steps": steps}).encode())


def read_kept(own: Filesystem) -> dict[int, tuple[str, ...]]:
    """Return why steps are kept; nothing if no manager wrote it down, or if it can't be read."""
    try:
        if own.file_nbytes(_NAME) is None:
            return {}
        found = parse_json(own.read_all(_NAME, limit_nbytes=_MOST_NBYTES))
        return {int(step): tuple(map(str, reasons)) for step, reasons in found["steps"].items()}
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError):
        return {}
