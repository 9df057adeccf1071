"""From flat keys back to nested dicts and lists, by the paths that DCP's planner stored.

    {"model.w": ("model", "w"), "steps.1": ("steps", 1)}  ->  {"model": {"w": ...}, "steps": [None, ...]}

Tuples that hold tensors were flattened as lists are: they come back as lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["nested", "paths_below", "paths_of"]

Path = tuple[str | int, ...]


def paths_of(metadata: Metadata) -> dict[str, Path]:
    """Return for each key of a checkpoint its place in the state dict; the key itself, if none was stored."""
    stored = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths: dict[str, Path] = {}
    for fqn in metadata.state_dict_metadata:
        path = stored.get(fqn)
        paths[fqn] = tuple(path) if isinstance(path, tuple | list) and path else (fqn,)
    return paths


def paths_below(paths: Mapping[str, Path], key: str) -> dict[str, Path]:
    """Return the keys of a value that was flattened, each with its place in that value.

    Args:
        paths: as from `paths_of`.
        key: of the value, its parts joined by dots.
    """
    found = {}
    for fqn, path in paths.items():
        if not fqn.startswith(f"{key}."):
            continue
        for length in range(1, len(path)):
            if ".".join(map(str, path[:length])) == key:
                found[fqn] = path[length:]
    return found


def nested(paths: Mapping[str, Path], values: Mapping[str, Any]) -> Any:
    """Return values in dicts and lists.

    Args:
        paths: the place of each value, by key.
        values: by key.
    """
    root = _Node()
    for fqn, path in paths.items():
        node: Any = root
        for part in path[:-1]:
            node = node.setdefault(part, _Node())
        node[path[-1]] = values[fqn]
    return _with_lists(root)


class _Node(dict[Any, Any]):
    """A dict or list that was flattened: not to be taken for a value that is a dict."""


def _with_lists(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    if not made or not all(type(key) is int for key in made):
        return made
    return [made.get(number) for number in range(max(made) + 1)]
