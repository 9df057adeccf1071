"""Steps that a run has left behind: it went back to an earlier one, and saved from there.

    .run/abandoned     {"schema": 1, "saves": {"<step>": ["<save id>", ...]}, "damaged": [<step>, ...]}

A save that is named here is no part of the run any more: it is not the newest, and no rule counts it. Where a rule says
what to keep it goes, but for those that a restore found damaged and passed over: what a person may still want to look
at stays. Once its step is saved again, another save has its place, which is not named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.base import Filesystem

_NAME = "abandoned"
_MOST_NBYTES = 64 << 20


@dataclass(frozen=True)
class Abandoned:
    """The saves that a run has left behind.

    Attributes:
        saves: their ids, by step: several of one that replicas have saved each for itself, with
            what these have in common, as not all of them may have been seen.
        damaged: the steps of those that turned out damaged.
    """

    saves: Mapping[int, frozenset[str]] = field(default_factory=dict)
    damaged: frozenset[int] = frozenset()

    def has(self, step: int, save_id: str, replica_id: str = "") -> bool:
        """Return whether a save is one of them, or another replica's save of the same state is."""
        known = self.saves.get(step, frozenset())
        return save_id in known or (replica_id != "" and replica_id in known)


def write_abandoned(own: Filesystem, abandoned: Abandoned) -> None:
    """Write down which saves are abandoned."""
    own.refuse_link()
    own.create_directory()
    saves = {str(step): sorted(save_ids) for step, save_ids in sorted(abandoned.saves.items())}
    document = {"schema": 1, "saves": saves, "damaged": sorted(abandoned.damaged)}
    own.publish(_NAME, json.dumps(document).encode())


def read_abandoned(own: Filesystem) -> Abandoned:
    """Return the abandoned saves."""
    if own.file_nbytes(_NAME) is None:
        return Abandoned()
    data = own.read_all(_NAME, limit_nbytes=_MOST_NBYTES)
    try:
        document = parse_json(data)
        saves = {int(step): _ids(found) for step, found in document["saves"].items()}
        return Abandoned(saves, frozenset(map(int, document.get("damaged", ()))))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            "It says which steps the run has left behind, and is damaged: remove it if there are none.",
            path=own.location(_NAME),
        ) from error


def _ids(found: str | list[str]) -> frozenset[str]:
    """Return the ids of the saves of one step; where there was one it stood alone once."""
    return frozenset([found] if isinstance(found, str) else map(str, found))
