"""Nested state taken apart into values by name, as DCP does, and put together again with the keys that it had.

Unlike DCP's `flatten_state_dict`, a path has each key of a dict as it is, not as text, an empty dict is a value, and so
is, as a whole, a dict with keys that no path can have, such as members of an enum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_nvcomp.errors import CheckpointError, ConfigurationError

# What torch.compile, DDP, activation checkpointing and FSDP1 put into the names of parameters.
_WRAPPERS: Final = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_SCALAR_KEYS: Final = (bool, int, float, bytes, type(None))
_MAX_DEPTH: Final = 16


@dataclass(frozen=True)
class Key:
    """A part of a path that is a key of a dict and no text."""

    value: Any  # an int, bool, float, None, bytes, or a tuple of these and of text

    def __str__(self) -> str:
        return str(self.value)


class Vacant:
    """The place of a value that is not there yet, in lists and dicts that are taken apart for it."""


# Text and `Key`s are keys of dicts, numbers are positions in lists.
Path = tuple["str | int | Key", ...]


@dataclass(frozen=True)
class Flattened:
    """A state taken apart."""

    values: dict[str, Any]  # what is no container, by name
    paths: dict[str, Path]  # the place of each value in the state, by name


def flatten(state: Mapping[str, Any]) -> Flattened:
    """Take a state apart."""
    return _flatten(state, _is_value)


def flatten_as_stock(state: Mapping[str, Any]) -> Flattened:
    """Take a state apart into the names that DCP gives; paths have the keys as they are."""
    return _flatten(
        state, lambda value, _: not isinstance(value, Mapping) and (not isinstance(value, list) or _is_flat(value))
    )


def flatten_as_2_3(state: Mapping[str, Any]) -> Flattened:
    """Take a state apart as DCP did up to torch 2.3: a dict or list without tensors was a value."""
    return _flatten(state, lambda value, _: not isinstance(value, Mapping | list) or not _has_tensors(value))


def _flatten(state: Mapping[str, Any], is_value: Callable[[Any, str], bool]) -> Flattened:
    found = Flattened({}, {})
    for key, value in state.items():
        part = _part(key)
        _take(value, str(part), (part,), is_value, found)
    return found


def _take(value: Any, fqn: str, path: Path, is_value: Callable[[Any, str], bool], found: Flattened) -> None:
    if isinstance(value, torch.Tensor) or is_value(value, fqn):
        if fqn in found.values:
            places = f"at {_shown(found.paths[fqn])} and at {_shown(path)}"
            raise ConfigurationError(f"Two values have this name, {places}: rename one of their keys.", fqn=fqn)
        found.values[fqn], found.paths[fqn] = value, path
    elif isinstance(value, Mapping):
        for key, one in value.items():
            part = key if type(key) is str else _part(key)
            _take(one, f"{fqn}.{part}", (*path, part), is_value, found)
    else:
        for number, one in enumerate(value):
            _take(one, f"{fqn}.{number}", (*path, number), is_value, found)


def _is_value(value: Any, fqn: str) -> bool:
    if isinstance(value, Mapping):
        if all(map(is_key, value)):
            return not value
        if _has_tensors(value):
            odd = next(key for key in value if not is_key(key))
            raise ConfigurationError(
                f"A key of this dict is {odd!r}, a {type(odd).__name__}: where a dict has tensors in it, its keys have "
                "to be text, numbers, bytes, None, or tuples of these.",
                fqn=fqn,
            )
        return True
    return not isinstance(value, list) or _is_flat(value)


def _is_flat(values: list[Any]) -> bool:
    """Return True for a list with neither tensors nor dicts in it, which DCP does not take apart."""
    kinds = (torch.Tensor, Mapping, Vacant)
    return not any(isinstance(one, kinds) or (isinstance(one, list) and not _is_flat(one)) for one in values)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def is_key(key: Any, depth: int = 0) -> bool:
    """Return True if a path can have this key of a dict."""
    if isinstance(key, str):
        return type(key) is str or str(key) == key  # unlike a member of an enum that is text
    if type(key) is tuple:
        return depth < _MAX_DEPTH and all(is_key(part, depth + 1) for part in key)
    if isinstance(key, float):
        return not math.isnan(key)  # which is equal to no key
    return isinstance(key, _SCALAR_KEYS) or _is_integer(key)


def _is_integer(key: Any) -> bool:
    return type(key).__module__ == "numpy" and hasattr(key, "__index__")


def _part(key: Any) -> str | Key:
    return str(key) if isinstance(key, str) else Key(_plain(key))


def _plain(key: Any) -> Any:
    """Return the plain value that is equal to a key, such as an int instead of a numpy integer."""
    kinds: tuple[type[Any], ...] = (str, bool, float, bytes)
    for kind in kinds:
        if isinstance(key, kind):
            return kind(key)
    if isinstance(key, tuple):
        return tuple([_plain(part) for part in key]) if is_key(key) else key
    return operator.index(key) if isinstance(key, int) or _is_integer(key) else key


def fqn_of(path: Sequence[object]) -> str:
    """Return the name of a place."""
    return ".".join(map(str, path))


def _shown(path: Path) -> str:
    return "".join(f"[{part.value if isinstance(part, Key) else part!r}]" for part in path)


def canonical_name(fqn: str) -> str:
    """Return a name without what wrappers of modules put into it."""
    if "_" not in fqn and "module" not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def nested(paths: Mapping[str, Path], values: Mapping[str, Any]) -> Any:
    """Put values together in dicts and lists; a list of which parts are missing becomes a dict."""
    root = _Node()
    for fqn, path in paths.items():
        node: Any = root
        for part in path[:-1]:
            node = node.setdefault(part, _Node())
            if type(node) is not _Node:
                raise CheckpointError("This value lies in another one, which is no dict or list.", fqn=fqn)
        if path[-1] in node:
            raise CheckpointError("Another value is in the place of this one.", fqn=fqn)
        node[path[-1]] = values[fqn]
    return _with_lists(root)


class _Node(dict[Any, Any]):
    """A dict or list that was flattened: not to be taken for a value that is a dict."""


def _with_lists(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    is_list = node and all(type(part) is int for part in node) and node.keys() == set(range(len(node)))
    if is_list:
        return [_with_lists(node[number]) for number in range(len(node))]
    return {part.value if type(part) is Key else part: _with_lists(value) for part, value in node.items()}


def replace_at(state: MutableMapping[str, Any], path: Path, value: Any) -> None:
    """Put a value in the place of another one in nested containers."""
    container: Any = state
    for part in path[:-1]:
        container = container[part.value if type(part) is Key else part]
    last = path[-1]
    container[last.value if type(last) is Key else last] = value
