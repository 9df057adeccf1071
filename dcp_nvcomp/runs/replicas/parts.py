"""Which ranks hold the whole state together: the replicas of HSDP, found in the placements of its tensors.

    placements of each DTensor -> ranks that hold it whole -> joined over all tensors, nodes and domains -> replicas

What two replicas share fails together, so ranks of one node, and of one failure domain, belong to one replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from dcp_nvcomp.errors import ConfigurationError

RankSet = frozenset[int]


def whole_sets(values: Iterable[Any], ranks: Sequence[int]) -> frozenset[RankSet]:
    """Return the sets of ranks that hold a DTensor whole, of all DTensors that this rank has a part of."""
    found: dict[Any, frozenset[RankSet]] = {}
    for tensor in _tensors(values):
        sharded = tuple(not placement.is_replicate() for placement in tensor.placements)
        key = (tensor.device_mesh, sharded)
        if key not in found:
            found[key] = _sets_of(tensor, sharded, ranks)
    return frozenset().union(*found.values())


def _tensors(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif hasattr(value, "local_shards"):
            raise ConfigurationError(
                'copies="replicas" goes by the placements of DTensors, and this state has a '
                f"{type(value).__name__}: use fully_shard (FSDP2), or a number of copies."
            )


def is_sharded(value: Any) -> bool:
    """True if a value is a DTensor, or has some in it."""
    return next(_tensors([value]), None) is not None


def _sets_of(tensor: DTensor, sharded: Sequence[bool], ranks: Sequence[int]) -> frozenset[RankSet]:
    """Return the sets of ranks that differ in nothing but their coordinates on sharded dimensions of the mesh."""
    mesh = tensor.device_mesh.mesh
    replicated = [at for at, one in enumerate(sharded) if not one]
    order = replicated + [at for at, one in enumerate(sharded) if one]
    count = 1
    for at in replicated:
        count *= mesh.size(at)
    place_of = {rank: place for place, rank in enumerate(ranks)}
    rows = mesh.permute(order).reshape(count, -1).tolist()
    if not all(rank in place_of for row in rows for rank in row):
        raise ConfigurationError("The state has tensors on ranks that are not in the process_group of the run.")
    return frozenset(frozenset(place_of[rank] for rank in row) for row in rows)


def joined(count: int, sets: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Join what overlaps.

    Examples:
        >>> joined(4, [{0, 1}, {2, 3}])
        ((0, 1), (2, 3))
        >>> joined(4, [{0, 1}, {2, 3}, {1, 2}])
        ((0, 1, 2, 3),)
    """
    belongs_to = list(range(count))

    def root_of(rank: int) -> int:
        while belongs_to[rank] != rank:
            rank = belongs_to[rank]
        return rank

    for one in sets:
        first, *others = sorted(one)
        for other in others:
            low, high = sorted((root_of(first), root_of(other)))
            belongs_to[high] = low
    groups: dict[int, list[int]] = {}
    for rank in range(count):
        groups.setdefault(root_of(rank), []).append(rank)
    return tuple(tuple(group) for _, group in sorted(groups.items()))
