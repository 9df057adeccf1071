"""The entries of a state, by their paths: which of them a replica lacks, and how they are added to it.

What each rank has for itself, such as the states of its generators, is no replica's but its own. A replica that is to
serve alone after the others are lost needs those of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dcp_nvcomp.errors import ConfigurationError

Path: TypeAlias = tuple[Any, ...]


def entries(values: Mapping[Any, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is no dict in a nested state, with its path.

    Examples:
        >>> list(entries({"a": {"b": 1}, "c": [2]}))
        [(('a', 'b'), 1), (('c',), [2])]
    """
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
    """Return a nested state with entries added; what it shares with the old one is unchanged.

    The dicts that get some are sorted, so that ranks of several replicas that have the same in the end have it in the
    same order, and their small tensors lie together in the same way.

    Examples:
        >>> with_entries({"a": {"c": 1}}, {("a", "b"): 2, ("d",): 3})
        {'a': {'b': 2, 'c': 1}, 'd': 3}
    """
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
