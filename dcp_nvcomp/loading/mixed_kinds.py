"""What ranks saved in one place that no nested state can have at once: a dict, a list, and a value that is neither.

The checkpoint has all of it, and the save said so. What the destination has in the place comes back in its kind. An
empty container, and a destination that has nothing there, get a container of Python objects; one with tensors belongs
to the ranks that have a place for them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_nvcomp.calls.values import Path, flatten
from dcp_nvcomp.format.metadata.paths import SavedEntry

logger = logging.getLogger(__name__)

_SHOWN = 8


def of_one_kind(own: Any, entries: Sequence[SavedEntry]) -> Sequence[SavedEntry]:
    """Return those of the saved entries that can be in one nested state, chosen by what the destination has."""
    inside: defaultdict[Path, set[type]] = defaultdict(set)  # by place: the kinds of containers there
    for entry in entries:
        for end, part in enumerate(entry.path):
            inside[entry.path[:end]].add(_container_of(part))
    values = {entry.path for entry in entries}
    mixed = [place for place, kinds in inside.items() if len(kinds) > 1 or place in values]
    if not mixed:
        return entries
    flat = flatten({"": own})
    places = {path[1:]: flat.values[fqn] for fqn, path in flat.paths.items()}
    chosen = {place: _chosen(place, places, entries) for place in mixed}
    kept = [entry for entry in entries if all(_fits(entry.path, *one) for one in chosen.items())]
    left = sorted({entry.fqn for entry in entries} - {entry.fqn for entry in kept})
    logger.warning(
        "Ranks saved a container and a value, or a dict and a list, in the same place. These are left: %s",
        ", ".join(map(repr, left[:_SHOWN])),
    )
    return kept


def _container_of(part: Any) -> type:
    return list if type(part) is int else dict


def _chosen(place: Path, own: Mapping[Path, Any], entries: Sequence[SavedEntry]) -> type | None:
    """Return the kind of container to take; None for the value."""
    there = own.get(place)
    kinds = {_container_of(path[len(place)]) for path in own if _is_below(path, place)}
    if place in own and (there or not isinstance(there, Mapping | list)):
        wanted: list[type | None] = [None, dict, list]
    elif kinds:
        wanted = [*kinds, None, dict, list]
    else:
        first = list if isinstance(there, list) else dict
        below = [entry for entry in entries if _is_below(entry.path, place) and _fits(entry.path, place, first)]
        has_tensors = any(isinstance(entry.item, TensorStorageMetadata) for entry in below)
        wanted = [None, first, dict, list] if has_tensors else [first, None, dict, list]
    return next(kind for kind in wanted if any(_is_in(entry.path, place, kind) for entry in entries))


def _is_below(path: Path, place: Path) -> bool:
    return len(path) > len(place) and path[: len(place)] == place


def _is_in(path: Path, place: Path, kind: type | None) -> bool:
    return path[: len(place)] == place and _fits(path, place, kind)


def _fits(path: Path, place: Path, kind: type | None) -> bool:
    """Return False for what is in the place, and of another kind."""
    if path[: len(place)] != place:
        return True
    return kind is None if path == place else _container_of(path[len(place)]) is kind
