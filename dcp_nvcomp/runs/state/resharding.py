"""Moves the places of data loaders in their data from one number of ranks to another.

A `Reshard` is given the states of all the loaders that were saved, by rank, and returns those of the new ranks. The one
here is for torchdata's `StatefulDataLoader` over a map-style dataset whose sampler says how many samples it yielded. It
adds up what the ranks consumed, and lets the new ones begin there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.runs.state.sampler import BEGIN, YIELDED

# torchdata's own names in the states of its loaders, as of 0.11: without workers all is at the top
SNAPSHOT: Final = "_snapshot"
_MAIN: Final = "_main_snapshot"
WORKERS: Final = "_worker_snapshots"
_SINCE: Final = "_steps_since_snapshot"
_BATCHES: Final = "_sampler_iter_state"
_WORKER_COUNT: Final = "_num_workers"
_FINISHED: Final = "_iterator_finished"
_FETCHERS: Final = ("_fetcher_state", "_dataset_state", "fetcher_state", "dataset_state")
_SAMPLER: Final = "sampler_state"
_SAMPLES: Final = "samples_yielded"


@dataclass(frozen=True)
class LoaderPart:
    """The state of one rank's data loader.

    Attributes:
        state: what its `state_dict()` returned.
        batch_size: how many samples a batch had; None if the loader did not say.
    """

    state: Mapping[str, Any]
    batch_size: int | None = None


Reshard: TypeAlias = Callable[[Sequence[LoaderPart], int], Sequence[Mapping[str, Any]]]


def reshard_for(loader: Any) -> Reshard:
    """Return how places are moved to loaders like this one.

    It serves loaders of torchdata over map-style datasets: with an `ElasticSampler` for any number of ranks, with
    torchdata's `StatefulDistributedSampler` where the new ranks can have consumed evenly what the old ones did. It
    raises CheckpointError for others.
    """

    def reshard(parts: Sequence[LoaderPart], world_size: int) -> list[dict[str, Any]]:
        place = _place(parts, world_size)
        is_finished = all(part.state.get(_FINISHED, False) for part in parts)
        fresh = loader.state_dict()
        return [_at(fresh, place, is_finished=is_finished) for _ in range(world_size)]

    return reshard


def state_for(loader: Any, part: LoaderPart) -> Mapping[str, Any]:
    """Return the state for the loader of the same rank of as many: as it was, or at its place with other workers."""
    workers = getattr(loader, "num_workers", None)
    before, sampler, consumed = _main_of(part.state).get(_WORKER_COUNT, 0), _sampler_state(part.state), _consumed(part)
    if workers is None or workers == before or sampler is None or consumed is None:
        return part.state
    is_finished = bool(part.state.get(_FINISHED, False))
    return _at(loader.state_dict(), {**sampler, YIELDED: consumed}, is_finished=is_finished)


def _place(parts: Sequence[LoaderPart], world_size: int) -> dict[str, Any]:
    """Return the state of the new ranks' samplers."""
    consumed = [_consumed(part) for part in parts]
    first = _sampler_state(parts[0].state)
    if first is None or None in consumed:
        raise CheckpointError(
            "The data loader's place can't be told from its state. Known are torchdata's StatefulDataLoader over a "
            "map-style dataset without a state of its own, with an ElasticSampler. For others pass reshard= to "
            "TrainingState, or go on with as many ranks as saved."
        )
    total = sum(one for one in consumed if one is not None)
    # ranks take turns: of what they consumed in whole rounds and a part of one, nothing is missing in between
    if consumed != [total // len(parts) + (rank < total % len(parts)) for rank in range(len(parts))]:
        raise CheckpointError(
            f"The ranks' data loaders were not at the same batch: they had yielded {consumed} samples."
        )
    if BEGIN in first:
        return {**first, BEGIN: first[BEGIN] + total, YIELDED: 0}
    if total % world_size:
        raise CheckpointError(
            f"The old ranks had consumed {total} samples, which {world_size} ranks can't have consumed evenly: use "
            "dcp_nvcomp.ElasticSampler instead of StatefulDistributedSampler, or go on with another number of ranks."
        )
    return {**first, YIELDED: total // world_size}


def _consumed(part: LoaderPart) -> int | None:
    """Return how many samples training got of a rank's loader since its sampler began; None if that can't be told."""
    sampler, since = _sampler_state(part.state), part.state.get(_SINCE, 0)
    if sampler is None or (since and part.batch_size is None) or _has_own_state(part.state):
        return None
    consumed: int = sampler[YIELDED] + since * (part.batch_size or 0)
    return consumed


def _main_of(state: Mapping[str, Any]) -> Any:
    """Return what a loader's state says of its main process."""
    return state[SNAPSHOT].get(_MAIN, {}) if isinstance(state.get(SNAPSHOT), Mapping) else state


def _sampler_state(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    batches = _main_of(state).get(_BATCHES)
    found = batches.get(_SAMPLER) if isinstance(batches, Mapping) else None
    return found if isinstance(found, Mapping) and isinstance(found.get(YIELDED), int) else None


def _has_own_state(state: Mapping[str, Any]) -> bool:
    """Return True if the dataset, or what fetches from it, has a state: only its author knows how to divide it."""
    workers = state[SNAPSHOT].get(WORKERS, {}).values() if SNAPSHOT in state else ()
    return any(one.get(name) is not None for one in (state, *workers) for name in _FETCHERS)


def _at(fresh: Mapping[str, Any], place: Mapping[str, Any], *, is_finished: bool) -> dict[str, Any]:
    """Return the state of a loader that has not begun, at another place."""
    moved = copy.deepcopy(dict(fresh))
    main = _main_of(moved)
    main[_BATCHES] = {**main[_BATCHES], _SAMPLER: dict(place), _SAMPLES: place[YIELDED]}
    moved[_FINISHED] = is_finished
    return moved
