"""Steps that a run has left behind: it went back to an earlier one on purpose, and saved from there.

    .run/abandoned     {"schema": 1, "saves": {"<step>": "<save id>"}}

A save that is named here is no part of the run any more: it is not the newest, no rule counts it, and where a rule says
what to keep it goes. Once its step is saved again, another save has its place, which is not named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import Filesystem

__all__ = ["read_abandoned", "write_abandoned"]

_NAME = "abandoned"
_MOST_NBYTES = 64 << 20


def write_abandoned(own: Filesystem, saves: Mapping[int, str]) -> None:
    """Write down which saves are abandoned.

    Args:
        own: the run's own directory, `.run`.
        saves: their ids, by step.

    Raises:
        StorageError: it could not be written.
    """
    own.create_directory()
    text = json.dumps({"schema": 1, "saves": {str(step): save_id for step, save_id in sorted(saves.items())}})
    own.publish(_NAME, text.encode())


def read_abandoned(own: Filesystem) -> dict[int, str]:
    """Return the ids of the abandoned saves, by step.

    Args:
        own: the run's own directory, `.run`.

    Raises:
        StorageError: it can't be read, or is damaged: a step that was abandoned must not be taken for the newest.
    """
    if own.file_nbytes(_NAME) is None:
        return {}
    data = own.read_all(_NAME, limit_nbytes=_MOST_NBYTES)
    try:
        return {int(step): str(save_id) for step, save_id in json.loads(data)["saves"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            "It says which steps the run has left behind, and is damaged: remove it if there are none.",
            path=own.location(_NAME),
        ) from error
