"""The moments of a run at which ranks are killed, and the function in which each of them is.

A step is on its way while the job does `save` (to the fast tier, to peers, to the durable tier, what is old goes), or
the job does `restore`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from dcp_nvcomp.format.names import REMOVING
from tests.faults.failpoints import Counts, Seam

DOOMED_FAST, DOOMED_DURABLE = 40, 20

_STAGES = "dcp_nvcomp.runs.background.stages"
_RESTORING = "dcp_nvcomp.runs.restoring.restore:Restoring"
_PUBLISHER, _RANKS = "dcp_nvcomp.runs.step_save:NodePublisher", "dcp_nvcomp.runs.agreement:Ranks"
_POSIX, _OUTPUT = "dcp_nvcomp.storage.local.filesystem:PosixFilesystem", "dcp_nvcomp.storage.local.output:PosixOutput"


@dataclass(frozen=True)
class Stage:
    """A moment."""

    name: str  # what the table calls it
    seam: Seam  # where a rank is then
    reached_by: Literal["all", "leaders", "coordinator"]
    during: Literal["save", "restore"] = "save"  # what the job does then
    victims: tuple[str, ...] = ("rank 0", "rank 3", "node 0", "node 1")  # who is killed


def _of_output(place: str) -> Counts:
    """Calls of a `PosixOutput` below a place."""
    return lambda arguments: place in arguments[0]._full


def _publishes(name: str, place: str) -> Counts:
    """Calls of `PosixFilesystem.publish` for a name at a place."""
    return lambda arguments: arguments[1] == name and place in arguments[0]._root


def _unlinks(pattern: str, place: str) -> Counts:
    """Calls of `os.unlink` at a place for a file that is there and has such a name."""

    def counts(arguments: tuple[Any, ...]) -> bool:
        path = str(arguments[0])
        return place in path and fnmatch(os.path.basename(path), pattern) and os.path.exists(path)

    return counts


# rank 3 removes nothing, and the others need not wait for it then
_REMOVING_RANKS = ("rank 0", "node 0", "node 1")


def _removals(tier: str, place: str, reached_by: Literal["leaders", "coordinator"]) -> tuple[Stage, ...]:
    moments = (
        ("marked for removal", Seam(_POSIX, "publish", "after", counts=_publishes(REMOVING, place))),
        ("`.metadata` removed", Seam("os", "unlink", "after", counts=_unlinks(".metadata", place))),
        ("a data file removed", Seam("os", "unlink", "after", counts=_unlinks("*.distcp", place))),
        ("the mark removed", Seam("os", "unlink", "after", counts=_unlinks(REMOVING, place))),
    )
    return tuple(Stage(f"{tier}: {name}", seam, reached_by, victims=_REMOVING_RANKS) for name, seam in moments)


STAGES = (
    Stage("fast: before staging", Seam("dcp_nvcomp.saving.writer:NvcompWriter", "prepare_local_plan", "before"), "all"),
    Stage("fast: half of a file written", Seam(_OUTPUT, "write", "halfway", 2, _of_output("/node-")), "all"),
    Stage("fast: all written, nothing published", Seam(_PUBLISHER, "__call__", "before"), "coordinator"),
    Stage("fast: published on one node", Seam(_PUBLISHER, "__call__", "after"), "coordinator"),
    Stage("fast: published", Seam(f"{_STAGES}:FastStage", "publish", "after"), "all"),
    Stage("copies: begin", Seam(_STAGES, "move_files", "before"), "all"),
    Stage("copies: half of a file", Seam(_RANKS, "exchange", "after", 2), "all"),
    Stage("copies: made", Seam(f"{_STAGES}:FastStage", "_copy", "after"), "all"),
    Stage("replicas: compared", Seam(_STAGES, "compared", "before"), "all"),
    Stage("upload: begins", Seam(_STAGES, "upload_files", "before"), "all"),
    Stage("upload: half of a file", Seam(_OUTPUT, "write", "before", 2, _of_output("/run/")), "all"),
    Stage("upload: all files up", Seam(f"{_STAGES}:DurableStage", "_commit", "before"), "coordinator"),
    Stage(
        "upload: half committed",
        Seam(_POSIX, "publish", "before", counts=_publishes(".metadata", "/run/")),
        "coordinator",
    ),
    Stage("upload: committed", Seam(f"{_STAGES}:DurableStage", "_commit", "after"), "coordinator"),
    *_removals("fast tier", f"/step-{DOOMED_FAST}", "leaders"),
    *_removals("durable tier", f"/run/step-{DOOMED_DURABLE}", "coordinator"),
    Stage("restore: `.metadata` on all nodes", Seam(_RESTORING, "_spread_metadata", "after"), "all", "restore"),
    Stage("restore: half of a file fetched", Seam(_RANKS, "exchange", "after", 2), "all", "restore"),
    Stage("restore: loading", Seam("dcp_nvcomp.loading.decoder:Decoder", "decode", "before"), "all", "restore"),
)
BY_NAME = {stage.name: stage for stage in STAGES}
