"""Which checkpoints of a run were opened and found complete, so that they need not be opened for each list.

    .run/seen     {"schema": 1, "complete": {"<directory>": "<identity of its listing>"}}

The identity is a hash of the names, sizes and times of all files of a checkpoint: what is replaced, cut off or copied
has another one. The file is written by who removes steps (a run's manager, `prune`), and read by all; nothing but time
depends on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.storage.base import Below, FileInfo, Filesystem

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.run_listing import Step

RUN_FOLDER: Final = ".run"
SEEN_NAME: Final = "seen"
_MOST_NBYTES: Final = 64 << 20


class Seen:
    """Checkpoints that were complete when they were opened."""

    def __init__(self, identities: Mapping[str, str] | None = None) -> None:
        self._identities = dict(identities or {})
        self._steps: dict[str, Step] = {}  # what this process has opened itself

    def has(self, folder: str, identity: str | None) -> bool:
        """Return whether a checkpoint was complete, and is as it was then."""
        return identity is not None and self._identities.get(folder) == identity

    def step(self, folder: str, identity: str | None) -> Step | None:
        """Return what this process found in a checkpoint that is as it was; None if it has to look."""
        return self._steps.get(folder) if self.has(folder, identity) else None

    def note(self, folder: str, identity: str | None, step: Step) -> None:
        """Note that a checkpoint is complete; without an identity nothing is noted."""
        if identity is not None:
            self._steps[folder] = step
            self._identities[folder] = identity

    def forget(self, folder: str) -> None:
        """Have a checkpoint opened again."""
        self._identities.pop(folder, None)

    def keep(self, folders: Collection[str]) -> None:
        """Forget all other checkpoints: they are gone."""
        for folder in self._identities.keys() - set(folders):
            self.forget(folder)
            self._steps.pop(folder, None)

    def to_bytes(self) -> bytes:
        """Return what `.run/seen` says."""
        return json.dumps({"schema": 1, "complete": dict(sorted(self._identities.items()))}).encode()


def identity_of(files: Iterable[FileInfo]) -> str | None:
    """Return the identity of a checkpoint's listing; None if the storage does not tell when files were written."""
    rows = sorted(
        (file.name.rpartition("/")[2], file.nbytes, file.modified_seconds, file.changed_seconds) for file in files
    )
    if any(modified is None for _, _, modified, _ in rows):
        return None
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def read_seen(filesystem: Filesystem, below: Below) -> Seen:
    """Return what is known of the checkpoints below a directory; nothing where it can't be read."""
    found: dict[str, str] = {}
    for file in below.files:
        folder, _, name = file.name.rpartition("/")
        run, _, own = folder.rpartition("/")
        if name != SEEN_NAME or own != RUN_FOLDER:
            continue
        try:
            document = parse_json(filesystem.read_all(file.name, limit_nbytes=_MOST_NBYTES))
            known = document["complete"].items()
            found |= {f"{run}/{step}" if run else step: str(identity) for step, identity in known}
        except (CheckpointError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return Seen(found)
