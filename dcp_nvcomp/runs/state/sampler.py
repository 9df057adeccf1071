"""A sampler whose place in the epoch does not depend on how many ranks there are.

    permutation of the epoch:  | consumed before a restart | round | round | ...
                               0                           begin

From `begin` on the ranks take turns, a sample each a round. A job that goes on with another number of ranks begins
where the last one ended: nothing is lost, and nothing comes twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from dcp_nvcomp.errors import ConfigurationError

BEGIN: Final = "begin"
YIELDED: Final = "yielded"


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
