"""From flat keys back to nested dicts and lists, by the paths that DCP's planner stored.

    {"model.w": ("model", "w"), "steps.0": ("steps", 0)}  ->  {"model": {"w": ...}, "steps": [...]}

Tuples that hold tensors were flattened as lists are: they come back as lists. What is left of a list of which parts are
missing is a dict. DCP makes text of the keys of dicts; `convert` notes which of them were integers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["IntKey", "nested", "paths_below", "paths_of", "paths_to_store"]

Path = tuple[str | int, ...]

# Beside the paths in planner_data: those that lead to a value of a dict under an integer.
_INT_KEYS: Final = ".int_keys"


class IntKey(int):
    """A part of a path that is a key of a dict, and not a position in a list."""


def paths_to_store(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return paths as DCP stores them, and which of their parts were integers.

    Args:
        paths: by key.
    """
    stored: dict[str, Any] = {fqn: _as_stored(path) for fqn, path in paths.items()}
    marked = {
        _as_stored(path[: at + 1]) for path in paths.values() for at, part in enumerate(path) if type(part) is IntKey
    }
    if marked and _INT_KEYS not in stored:
        stored[_INT_KEYS] = tuple(sorted(marked, key=str))
    return stored


def _is_path(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(part) in (str, int) for part in value)


def _as_stored(path: Path) -> Path:
    return tuple(str(int(part)) if type(part) is IntKey else part for part in path)


def _with_int_keys(path: Path, marked: Collection[Path]) -> Path:
    return tuple(
        IntKey(part) if type(part) is str and path[: at + 1] in marked and _is_integer(part) else part
        for at, part in enumerate(path)
    )


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,18}", text) is not None


def paths_of(metadata: Metadata) -> dict[str, Path]:
    """Return for each key of a checkpoint its place in the state dict; the key itself, if none was stored."""
    stored = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    noted = () if _INT_KEYS in metadata.state_dict_metadata else stored.get(_INT_KEYS, ())
    marked = {path for path in noted if _is_path(path)} if isinstance(noted, tuple) else set[Path]()
    paths: dict[str, Path] = {}
    for fqn in metadata.state_dict_metadata:
        path = stored.get(fqn)
        paths[fqn] = tuple(path) if isinstance(path, tuple | list) and path else (fqn,)
        if marked:
            paths[fqn] = _with_int_keys(paths[fqn], marked)
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
    made = {int(key) if type(key) is IntKey else key: _with_lists(value) for key, value in node.items()}
    is_list = made and all(type(key) is int for key in node) and made.keys() == set(range(len(made)))
    return [made[number] for number in range(len(made))] if is_list else made
