"""What each rank saw when it opened the checkpoint, compared on the coordinator: all ranks must load one save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.planner import LoadPlan

from dcp_nvcomp.errors import CheckpointReplacedError, ConfigurationError


class Seen(NamedTuple):
    """What a rank saw."""

    save_id: str | None  # id of the save; None if the checkpoint has none, as those of stock DCP
    place: str  # path or URL, without passwords


def seen_by(plans: Sequence[LoadPlan]) -> list[Seen]:
    """Return what the ranks saw, from their plans."""
    return [plan.storage_data for plan in plans]


def check_same_save(plans: Sequence[LoadPlan], path: str) -> None:
    """Raise if the ranks saw different saves."""
    seen = seen_by(plans)
    saves, places = sorted({str(one.save_id) for one in seen}), sorted({one.place for one in seen})
    if len(saves) < 2:
        return
    if len(places) > 1:
        raise ConfigurationError(
            f"The ranks load different checkpoints, {places[0]!r} and {places[1]!r}: give all ranks the same path. "
            "If these are names of one place, another save replaced the checkpoint there: load again."
        )
    raise CheckpointReplacedError(
        f"Another save replaced the checkpoint during the load (saves {saves}): load again.", path=path
    )
