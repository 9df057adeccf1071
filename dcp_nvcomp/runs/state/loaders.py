"""The places of data loaders in their data, on any number of ranks.

From `begin`, the number of samples that were consumed before a restart, the ranks take turns, a sample each a round. A
job that goes on with another number of ranks begins where the last one ended. A `Reshard` is given the states of all
loaders that were saved, by rank, and returns those of the new ranks.

A loader's state is stored as entries of a checkpoint: its own, and one for each of its workers, which may hold large
buffers (of tokens, of shuffled samples).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from dcp_nvcomp.errors import CheckpointError, ConfigurationError

BEGIN: Final = "begin"
YIELDED: Final = "yielded"
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
LOADER: Final = "loader"


class ElasticSampler(Sampler[int]):
    """Divide a map-style dataset among ranks, as torch's `DistributedSampler` does, and go on with any number of ranks.

    The ranks draw the same permutation from `seed` and epoch and share what is left of it, also after a restart with
    more or fewer of them. `TrainingState(dataloader=...)` knows how to move its place from the old ranks to the new.

    Args:
        dataset: what is sampled; only its length counts.
        num_replicas: number of ranks; by default that of `process_group`.
        rank: this rank among them; by default that in `process_group`.
        shuffle: if False, in the order of the dataset.
        seed: of the permutations; the same on all ranks.
        drop_last: the ranks always get the same number of samples. If True, the last of an epoch are left out if they
            are not enough for all ranks, else the first ones come again to make them enough.
        process_group: among whose ranks the dataset is divided; by default all ranks.

    Raises:
        ConfigurationError: the dataset is empty, or `rank` is not below `num_replicas`.

    Examples:
        >>> sampler = ElasticSampler(range(8), num_replicas=2, rank=1, shuffle=False)
        >>> samples = iter(sampler)
        >>> next(samples), next(samples), sampler.state_dict()
        (1, 3, {'epoch': 0, 'begin': 0, 'yielded': 2})
        >>> alone = ElasticSampler(range(8), num_replicas=1, rank=0, shuffle=False)
        >>> alone.load_state_dict({"epoch": 0, "begin": 4, "yielded": 0})
        >>> list(alone), list(alone)
        ([4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7])
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size(process_group) if is_distributed else 1
        if rank is None:
            rank = dist.get_rank(process_group) if is_distributed else 0
        if not 0 <= rank < num_replicas:
            raise ConfigurationError(f"ElasticSampler(rank={rank}) must be below num_replicas={num_replicas}.")
        if len(dataset) == 0:
            raise ConfigurationError("ElasticSampler can't sample an empty dataset.")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._begin = self._yielded = 0
        self._is_placed = False  # True if the next iterator goes on from there

    def set_epoch(self, epoch: int) -> None:
        """Draw another permutation: call it before each epoch. The epoch that a loaded state is in stays in its place.

        Args:
            epoch: number of the epoch, the same on all ranks.
        """
        if epoch != self.epoch:
            self._place(0, 0, is_placed=False)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # not a generator, whose first lines would run only when the first sample is asked for: a data loader that
        # restores the end of an epoch makes one iterator and drops it
        if not self._is_placed:
            self._place(0, 0, is_placed=False)
        self._is_placed = False
        return self._samples(self._permutation(), self._begin, self._yielded)

    def _samples(self, permutation: list[int], begin: int, yielded: int) -> Iterator[int]:
        for number in range(yielded, self._count(begin)):
            self._yielded = number + 1
            yield permutation[(begin + number * self.num_replicas + self.rank) % len(permutation)]

    def _permutation(self) -> list[int]:
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        found: list[int] = torch.randperm(
            count, generator=torch.Generator().manual_seed(self.seed + self.epoch)
        ).tolist()
        return found

    def _count(self, begin: int) -> int:
        """Return how many samples each rank gets from `begin` on."""
        left = max(len(self.dataset) - begin, 0)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __len__(self) -> int:
        """Return how many samples this rank gets of an epoch, or of what is left of it after a restart."""
        is_over = not self._is_placed and self._yielded >= self._count(self._begin)
        return self._count(0 if is_over else self._begin)

    def state_dict(self) -> dict[str, int]:
        """Return this rank's place: the epoch, where in it the ranks began, and how many samples it got since."""
        return {"epoch": self.epoch, BEGIN: self._begin, YIELDED: self._yielded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from such a place with the next iterator.

        Args:
            state_dict: of a rank of a job with as many ranks, or as `TrainingState` makes it for another number.
        """
        self.epoch = int(state_dict["epoch"])
        self._place(int(state_dict[BEGIN]), int(state_dict[YIELDED]), is_placed=True)

    def _place(self, begin: int, yielded: int, *, is_placed: bool) -> None:
        self._begin, self._yielded, self._is_placed = begin, yielded, is_placed


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
            "dcp_nvcomp.runs.ElasticSampler instead of StatefulDistributedSampler, or another number of ranks."
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


def split_state(part: LoaderPart) -> dict[str, tuple[Any, ...]]:
    state = dict(part.state)
    snapshot = state.get(SNAPSHOT)
    workers: Mapping[str, Any] = {}
    if isinstance(snapshot, Mapping) and isinstance(snapshot.get(WORKERS), Mapping):
        workers = snapshot[WORKERS]
        state[SNAPSHOT] = {name: value for name, value in snapshot.items() if name != WORKERS}
    return {LOADER: ((state, part.batch_size),), **{name: (one,) for name, one in workers.items()}}


def joined(entries: Mapping[str, tuple[Any, ...]]) -> LoaderPart:
    ((state, batch_size),) = entries[LOADER]
    workers = {name: one for name, (one,) in entries.items() if name != LOADER}
    if isinstance(state.get(SNAPSHOT), Mapping):
        state = {**state, SNAPSHOT: {**state[SNAPSHOT], WORKERS: workers}}
    return LoaderPart(state, batch_size)
