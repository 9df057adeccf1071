"""Which ranks hold the whole state together, and which of its entries each of these replicas lacks.

What two replicas share fails together, so ranks of one node, and of one failure domain, belong to one replica. What
each rank has for itself, such as states of generators, goes to all replicas: one that is left alone needs those of all
ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from dcp_nvcomp.errors import ConfigurationError

RankSet = frozenset[int]
Path: TypeAlias = tuple[Any, ...]


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
    """Join what overlaps."""
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


def entries(values: Mapping[Any, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is no dict in a nested state, with its path."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from entries(value, (*at, key))
        else:
            yield (*at, key), value


def digest_of(paths: Mapping[Path, bool]) -> bytes:
    """Return a digest of paths, and of which entries are sharded."""
    return hashlib.sha256(repr(list(paths.items())).encode()).digest()


def missing_on(replicas: Sequence[Sequence[int]], paths: Sequence[Mapping[Path, bool]]) -> dict[Path, int]:
    """Return the entries that some replica lacks, with the first rank that has them."""
    found: dict[Path, int] = {}
    everywhere = set.intersection(*(set().union(*(paths[rank] for rank in one)) for one in replicas))
    for rank, own in enumerate(paths):
        for path, sharded in own.items():
            if path in everywhere:
                continue
            if sharded:
                raise ConfigurationError(
                    f'copies="replicas" needs replicas that hold the same tensors, and {path!r} is not on all of them '
                    "(stages of a pipeline?): use a number of copies."
                )
            found.setdefault(path, rank)
    dicts = {path[:depth] for own in paths for path in own for depth in range(1, len(path))}
    for path in found:
        if path in dicts:
            raise ConfigurationError(
                f'copies="replicas": {path!r} is an entry on some ranks, and a dict with entries on others: save the '
                "same kind of value on all, or use a number of copies."
            )
    return found


def own_of(values: Mapping[Any, Any], owners: Mapping[Path, int], rank: int) -> dict[Path, Any]:
    """Return the entries that a rank gives to replicas that lack them, in host memory."""
    if rank not in owners.values():
        return {}
    return {path: _on_host(value) for path, value in entries(values) if owners.get(path) == rank}


def _on_host(value: Any) -> Any:
    """Return a value whose tensors are in host memory, each in memory of its own: more of it would be pickled."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    if type(value) is dict:
        return {key: _on_host(one) for key, one in value.items()}
    return value


def with_entries(values: Mapping[Any, Any], added: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return a nested state with entries added, sorted so that all replicas have them in the same order."""
    result, below = dict(values), dict[Any, dict[Path, Any]]()
    for (key, *rest), value in added.items():
        if rest:
            below.setdefault(key, {})[tuple(rest)] = value
        else:
            result[key] = value
    for key, inner in below.items():
        result[key] = with_entries(result.get(key, {}), inner)
    if result.keys() == values.keys():
        return result
    return {key: result[key] for key in sorted(result, key=repr)}
